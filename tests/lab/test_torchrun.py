"""The launcher of `make run`: quiet after a rank's own words, and nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = [
    sys.executable,
    "-m",
    "lab.torchrun",
    "--standalone",
    "--local-addr=localhost",
    "--nproc-per-node=2",
]

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1: this machine has no such thing.")
time.sleep(60)
"""

# Like a rank inside gloo, these ranks do not notice Ctrl-C.
STUCK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(60)
"""


def launch(folder: Path, text: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(text)
    command = [*LAUNCH, str(script), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_fails_has_the_last_word_but_one(tmp_path):
    with launch(tmp_path, FAILS) as torchrun:
        _, err = torchrun.communicate(timeout=40)
    assert torchrun.returncode == 1
    assert err.splitlines() == [
        "rank 1: this machine has no such thing.",
        "rank 1 ended with exit code 1; the others were stopped.",
    ]


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_leaves_no_process_behind(tmp_path, times):
    pids = [tmp_path / "0", tmp_path / "1"]
    with launch(tmp_path, STUCK) as torchrun:
        try:
            deadline = time.monotonic() + 40
            while not all(pid.exists() and pid.read_text() for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.05)
            for _ in range(times):
                torchrun.send_signal(signal.SIGINT)
                time.sleep(0.05)
            _, err = torchrun.communicate(timeout=10)
        finally:
            torchrun.kill()
    assert torchrun.returncode != 0
    assert err.splitlines() == ["stopped all ranks."]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
