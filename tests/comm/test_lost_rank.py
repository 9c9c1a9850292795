"""Test that survivors name the rank that dies while all exchange something: by torch, or over the store."""

import dataclasses
import os
import signal
import sys
import time

from comm.exchange import on_all
from comm.rendezvous import join, leave
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace import timeline
from tests.comm.places import places, set_variables


@dataclasses.dataclass
class Args:
    """No arguments."""


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


def test_ranks_that_gather_their_traces_notice_at_once_that_one_has_died():
    def run(cluster: Cluster, environments: list[dict[str, object]], dies_in: str) -> tuple[str, float]:
        set_variables(environments[cluster.rank])
        cluster = join()
        if dies_in == "gather_events":
            timeline.align(cluster)
        on_all("begin", lambda: None)
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start, said = time.monotonic(), ""
        try:
            timeline.gather_events(cluster, timeline.align(cluster) if dies_in == "align" else 0)
        except WorkbookError as error:
            said = str(error)
        took = time.monotonic() - start
        leave(cluster)
        return said, took

    for dies_in, survivors in (("align", (0, 2)), ("gather_events", (0,))):
        environments = places([0, 1, 2], 3)
        ends = run_ranks(run, 3, environments, dies_in, backend=None, collect_failures=True, timeout=30)
        for rank in survivors:
            said, took = ends[rank]
            assert said.startswith(f"timeline.{dies_in} has waited for rank {1 if rank == 0 else 0}. "), said
            assert "but rank 1 has died, so look for the first error in its log" in said
            assert took < 5  # OP_TIMEOUT is 60
