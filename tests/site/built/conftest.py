"""Build the site once for all tests of this folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_modes import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; the build must end without a word but that of where it is."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, ROOT / "site" / "build.py", "--out", out],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The site is built: open {out / 'html' / 'index.html'} in any browser.\n"
    return out / "html"
