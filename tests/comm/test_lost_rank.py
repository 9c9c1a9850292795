"""Survivors of a rank that dies while all exchange something, by torch's own collectives, name that rank."""

import dataclasses
import os
import signal
import sys

from comm.script import start
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.together import on_all
from tests.comm.test_rendezvous import places, set_variables


@dataclasses.dataclass
class Args:
    """Nothing."""


def main(cluster: Cluster, args: Args) -> None:
    on_all("begin", lambda: None)
    if cluster.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    on_all("save it", lambda: None)


def test_all_survivors_say_what_failed_and_who_has_died(capfd):
    def run(cluster: Cluster, environments: list[dict[str, object]]) -> None:
        set_variables(environments[cluster.rank])
        sys.argv = ["script.py"]
        start(main, Args)

    ends = run_ranks(run, 3, places([0, 1, 2], 3), backend=None, collect_failures=True, timeout=30)
    assert [str(end).split(" before")[0] for end in ends] == [
        "rank 0 exited with code 1",
        "rank 1 was killed by SIGKILL",
        "rank 2 exited with code 1",
    ]
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot" in line]
    assert said
    for line in said:
        assert "cannot save it: another rank has died or left (rank 1 has died, " in line
