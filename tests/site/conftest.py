"""The site and its pages. `make check-site` builds and tests the site; a plain `pytest` tests only pages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_modes import ROOT


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs the built site unless this folder was asked for."""
    here = Path(__file__).parent
    asked_for = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    is_asked_for = any(path.resolve().is_relative_to(here) for path in asked_for)
    return True if collection_path == here / "built" and not is_asked_for else None


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all pages to play with."""
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([sys.executable, ROOT / "site" / "pages.py", "--out", folder], check=True, timeout=100)
    return folder
