"""`make compare` from its command to its picture."""

import os
import subprocess
import sys

from tests.run_modes import ROOT


def test_two_modes_are_compared_in_a_table_a_sentence_and_a_picture(tmp_path):
    settings = {"MODES": "data_parallel_naive data_parallel_bucket_overlap", "WORLD_SIZE": "2"}
    settings |= {"ARGS": "--size tiny --steps 4 --link 1gbit", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "training.compare"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (
        " of one of data_parallel_" in done.stdout and "communication that no computing hides" in done.stdout
    )
    [picture] = (tmp_path / "traces").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")
