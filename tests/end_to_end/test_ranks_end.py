"""Ranks and their files do not outlive their parent, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.comm.places import places
from tests.processes import is_alive, session, wait_until

SLEEPERS = """
import os, time
from pathlib import Path
from lab.ranks import run_ranks

print("the script runs")

class Point:
    def __init__(self, x):
        self.x = x

def move(cluster, point):
    return Point(point.x + cluster.rank)

def sleep(cluster):
    Path(os.environ["PIDS"], str(cluster.rank)).write_text(str(os.getpid()))
    time.sleep(60)

print([point.x for point in run_ranks(move, 3, Point(10))], flush=True)
run_ranks(sleep, 3)
"""


def all_numbers(folder: Path, how_many: int) -> bool:
    return sum(path.read_text().isdecimal() for path in folder.iterdir()) == how_many


def test_nothing_is_left_behind_after_ctrl_c_or_when_the_parent_is_killed(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("t")  # short: a Unix socket's name has at most 107 characters
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    runs = {}
    for name in ("SIGINT", "SIGKILL"):
        for folder in ("pids", "tmp"):
            (tmp_path / name / folder).mkdir(parents=True)
        environment = os.environ | {
            "PIDS": str(tmp_path / name / "pids"),
            "TMPDIR": str(tmp_path / name / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),  # importing torch makes one
        }
        runs[name] = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # In the background of a script Ctrl-C is ignored, and would be here, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        for name, process in runs.items():
            pids_folder = tmp_path / name / "pids"
            asleep = wait_until(lambda: all_numbers(pids_folder, 3) and process.poll() is None, 60)
            assert asleep, process.communicate(timeout=5)
            pids = [int(path.read_text()) for path in pids_folder.iterdir()]
            assert all(is_alive(pid) for pid in pids)
            if name == "SIGINT":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all in the foreground
            else:
                process.kill()
            output, error = process.communicate(timeout=20)  # as long as a process holds the output
            # No process has run the script again to find its classes, though its main is not guarded.
            assert output.splitlines() == ["the script runs", "[10, 11, 12]"]
            orphans = lambda: [pid for pid in {*pids, *session(process.pid)} if is_alive(pid)]  # noqa: E731
            assert wait_until(lambda: not orphans(), 10), f"after {name} are left: {orphans()}"
            left_over = lambda: list((tmp_path / name / "tmp").glob("ranks-*"))  # noqa: E731
            assert wait_until(lambda: not left_over(), 5), f"after {name} is left: {left_over()}"
            if name == "SIGINT":
                assert "KeyboardInterrupt" in error
                assert list((tmp_path / name / "tmp").iterdir()) == []
    finally:
        for process in runs.values():
            process.kill()
            process.wait()


ENDS_TOO_EARLY = """
import torch
from comm.point_to_point import isend
from comm.rendezvous import join, leave
cluster = join()
transfer = isend(torch.ones(10), 1 - cluster.rank)  # no rank receives it
leave(cluster)
"""


def test_a_program_that_ends_with_a_message_on_its_way_ends_without_a_crash():
    ranks = []
    for environment in places([0, 1], 2):
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        ranks.append(
            subprocess.Popen([sys.executable, "-c", ENDS_TOO_EARLY], env=variables, stderr=subprocess.PIPE)
        )
    for rank in ranks:
        _, said = rank.communicate(timeout=50)
        assert rank.returncode == 0, said.decode()
