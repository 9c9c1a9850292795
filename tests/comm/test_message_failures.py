"""A rank that dies, leaves or is paused while others wait for it ends in a sentence that names it."""

import os
import signal
import time

import pytest
import torch

from comm.point_to_point import irecv, isend, recv, send
from comm.transport import shared_memory
from comm.transport.choice import use_transport
from lab.ranks import RankError, run_ranks
from tests.comm.helpers import error_text
from tests.comm.test_failures import die

pytestmark = pytest.mark.skipif(not shared_memory.is_possible(), reason="the segments are Linux's")
LARGE = 30_000_000


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_that_is_killed_is_named_at_once_by_all_that_wait_for_it(transport: str):
    def one_dies(cluster) -> tuple[str, float]:
        use_transport(transport)
        x = torch.zeros(4)
        if cluster.rank == 1:
            for peer in (0, 2):
                send(x, peer)
            cluster.store.wait(["both wait"])
            time.sleep(0.2)
            die()
        recv(x, 1)
        if cluster.store.add("waiting", 1) == 2:
            cluster.store.set("both wait", "")
        call = recv if cluster.rank == 0 else send
        text = error_text(lambda: call(x, 1))
        return text, time.monotonic()

    ends = run_ranks(one_dies, 3, collect_failures=True, group_timeout=30)
    verbs = {0: "receive from", 2: "send to"}
    for rank, verb in verbs.items():
        assert ends[rank][0] == (
            f"point_to_point (direct): rank {rank} could not {verb} rank 1: it lost the connection; rank 1 "
            "has died or left, so look for the first error in its log."
        )
    assert abs(ends[0][1] - ends[2][1]) < 10


def test_a_paused_rank_is_waited_for_until_the_timeout_and_named():
    def one_is_paused(cluster) -> str:
        x = torch.zeros(LARGE)
        if cluster.rank == 1:
            for peer in (0, 2):
                send(torch.zeros(1), peer)
            cluster.store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # itself, so that it holds no lock of the store
            return ""
        recv(torch.zeros(1), 1)
        sleeper, start = int(cluster.store.get("sleeper")), time.monotonic()
        text = error_text(lambda: (recv if cluster.rank else send)(x, 1))
        assert 1.5 <= time.monotonic() - start < 10
        if cluster.store.add("given up", 1) == 2:
            os.kill(sleeper, signal.SIGCONT)
        return text

    texts = run_ranks(one_is_paused, 3, group_timeout=1.5)
    for rank, verb in ((0, "send to"), (2, "receive from")):
        assert f"rank {rank} could not {verb} rank 1: it waited until the timeout" in texts[rank]


def test_a_hang_is_drawn_as_the_cycle_of_ranks_that_send_first():
    def work(cluster) -> None:
        got = irecv(torch.zeros(1), (cluster.rank - 1) % 3)
        isend(torch.zeros(1), (cluster.rank + 1) % 3).wait()
        got.wait()
        send(torch.zeros(10), (cluster.rank + 1) % 3)

    with pytest.raises(RankError) as error:
        run_ranks(work, 3, timeout=1)
    links = " -> ".join(f"rank {rank} waits to send 40 bytes to rank {(rank + 1) % 3}" for rank in range(3))
    assert str(error.value).splitlines()[-1].strip().endswith(links)
