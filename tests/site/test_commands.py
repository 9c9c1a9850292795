"""The command that writes pages refuses what cannot be done in a sentence."""

import subprocess
import sys

from tests.run_modes import ROOT


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "pages"
    command = [sys.executable, ROOT / "site" / "pages.py", "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == f"--out {folder}: cannot write there (Not a directory).\n"
