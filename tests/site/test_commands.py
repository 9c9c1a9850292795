"""The commands that build pages refuse what cannot be done in a sentence."""

import subprocess
import sys

import pytest

from tests.run_modes import ROOT


@pytest.mark.parametrize("script", ["pages.py", "build.py"])
def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(script, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "pages"
    command = [sys.executable, ROOT / "site" / script, "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == f"--out {folder}: cannot write there (Not a directory).\n"


def test_a_missing_sphinx_is_named_with_its_cure():
    command = [
        sys.executable,
        "-c",
        "import sys; sys.modules['sphinx'] = None; exec(open('site/build.py').read())",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "The site needs Sphinx: run `make setup`, which installs requirements.txt.\n"
