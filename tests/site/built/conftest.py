"""Build the site once for all tests of this folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_modes import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; the build of `make site` must end without a word."""
    out = tmp_path_factory.mktemp("site")
    recipe = (ROOT / "Makefile").read_text().partition("\t@$(PY) -m sphinx ")[2].partition("\n")[0]
    options = recipe.replace("site/_build", str(out)).split()
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return out / "html"
