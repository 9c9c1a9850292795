"""Ctrl-C at the launcher of a training lets the ranks save, and leaves no process."""

import os
import re
import signal
import subprocess
import sys

from tests.run_modes import ROOT


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_at_the_launcher_saves_and_leaves_no_process(tmp_path):
    folder, errors = tmp_path / "run", tmp_path / "errors"
    command = [sys.executable, "-m", "lab.launch.torchrun"]
    command += ["--nproc-per-node=2", "data_parallel/train_naive.py", "--size", "tiny", "--steps", "100000"]
    command += ["--checkpoint", str(folder)]

    def pids() -> list[int]:
        return [int(pid) for pid in re.findall(r"here as process (\d+)", errors.read_text())]

    with (
        errors.open("w") as err,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True) as torchrun,
    ):
        try:
            assert torchrun.stdout is not None
            assert any("step 1/100000" in line for line in torchrun.stdout)
            assert len(pids()) == 2
            torchrun.send_signal(signal.SIGINT)
            torchrun.communicate(timeout=30)
            assert not any(alive(pid) for pid in pids())
        finally:
            torchrun.kill()
            for pid in filter(alive, pids()):
                os.kill(pid, signal.SIGKILL)
    assert torchrun.returncode > 0
    said = errors.read_text()
    assert "Traceback" not in said
    [step] = set(re.findall(r"^rank [01]: stopped after step (\d+) of 100000;", said, re.MULTILINE))
    assert os.listdir(folder) == [f"step-{step}"]
