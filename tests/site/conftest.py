"""The site and its pages, which `make check-site` builds and tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_modes import ROOT


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all pages to play with."""
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([sys.executable, ROOT / "site" / "pages.py", "--out", folder], check=True, timeout=100)
    return folder
