"""If a peer dies, sleeps or leaves, the others name it in a sentence, no rank hangs, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError, all_reduce
from comm.point_to_point import irecv, isend, recv, send
from comm.transport import shared_memory
from comm.transport.choice import use_transport
from comm.transport.streams import Streams, transports_of
from lab.ranks import RankError, run_ranks
from lab.replace import replaced
from tests.comm.helpers import error_text, over
from tests.comm.places import places

linux = pytest.mark.skipif(not shared_memory.is_possible(), reason="the segments are Linux's")
DIED = "has died or left, so look for the first error in its log"


def die(*args, **kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def outcomes(fn, world_size: int, **options) -> list[str]:
    """Return each rank's result or the text of its error. Timeouts are long: no error may need them."""
    results = run_ranks(fn, world_size, collect_failures=True, **{"group_timeout": 40, **options})
    return [sentence(str(result)) if isinstance(result, RankError) else result for result in results]


def sentence(text: str) -> str:
    """Return the CommError at the end of a traceback."""
    return text.rsplit("comm.errors.CommError: ", 1)[-1]


@pytest.mark.parametrize(
    ("pattern", "transport"),
    [("ring", "auto"), ("tree", "sockets"), ("halving_doubling", "gloo"), ("torch", "gloo")],
)
def test_a_rank_that_dies_before_an_all_reduce_is_named_by_those_who_meet_it(pattern: str, transport: str):
    def one_dies(cluster) -> None:
        use_transport(transport)
        collectives.barrier()
        collectives.barrier(pattern="torch")
        if cluster.rank == 2:
            die()
        all_reduce(torch.ones(10), pattern=pattern)

    texts = outcomes(one_dies, 4)
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce ({pattern}): rank {rank} ") and DIED in texts[rank]
    if pattern != "torch":
        assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_a_rank_that_dies_in_the_middle_of_an_all_reduce_is_named(transport: str):
    def one_dies(cluster) -> None:
        collectives.barrier()
        x = torch.ones(1_000_000)
        if cluster.rank == 2:
            with replaced("comm.algorithms.reduction.combine", die):  # its first segment has just arrived
                all_reduce(x, pattern="pipelined_ring")
        all_reduce(x, pattern="pipelined_ring")

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 4)
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce (pipelined_ring): rank {rank} could not ")
        assert DIED in texts[rank]
    assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


def test_an_asynchronous_operation_of_a_smaller_group_names_a_dead_peer_by_its_rank_in_the_job():
    def one_dies(cluster) -> str:
        group = dist.new_group([1, 3])
        collectives.barrier()
        if cluster.rank == 3:
            die()
        if cluster.rank != 1:
            return ""
        return error_text(all_reduce(torch.ones(10), group=group, async_op=True).wait)

    text = outcomes(one_dies, 4)[1]
    assert "all_reduce (ring): rank 1 could not" in text and "rank 3 has died or left" in text


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_that_is_killed_is_named_at_once_by_all_that_wait_for_its_messages(transport: str):
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


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_rank_that_dies_while_its_messages_are_on_their_way_is_an_error_and_never_garbage(transport: str):
    def one_dies(cluster) -> str:
        x = torch.full((3_000_000,), float(cluster.rank))
        collectives.broadcast(x, root=1)
        if cluster.rank == 1:
            x.fill_(7)
            with replaced("comm.transport.streams.Streams.finish", die):
                all_reduce(x, pattern="flat")
        text = error_text(lambda: all_reduce(x, pattern="flat"))
        return text or f"values {sorted(set(x.tolist()))}"

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 3, group_timeout=20)
    for rank in (0, 2):
        assert "has died or left" in texts[rank] or texts[rank] == "values [9.0]", texts[rank]


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_a_paused_rank_is_waited_for_until_the_timeout_and_named(transport: str):
    def one_is_paused(cluster) -> str:
        use_transport(transport)
        collectives.barrier()
        if cluster.rank == 1:
            cluster.store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # itself, so that it holds no lock of the store
            return ""
        sleeper, start = int(cluster.store.get("sleeper")), time.monotonic()
        text = error_text(lambda: all_reduce(torch.ones(100_000), pattern="ring"))
        assert time.monotonic() - start < 10
        if cluster.store.add("given up", 1) == 2:
            os.kill(sleeper, signal.SIGCONT)
        return text

    texts = run_ranks(one_is_paused, 3, group_timeout=1.5)
    assert all("it waited until the timeout" in texts[rank] for rank in (0, 2))


@linux
def test_mismatches_leave_no_connection_and_no_memory_behind():
    def open_files(cluster) -> list[int]:
        counts = []
        for _ in range(4):
            for transport in ("shared_memory", "sockets"):
                use_transport(transport)
                with pytest.raises(CommError):
                    all_reduce(torch.ones(1 + cluster.rank))
                all_reduce(torch.ones(3))
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in run_ranks(open_files, 3):
        assert len(set(counts[1:])) == 1


@linux
@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_a_rank_without_memory_to_share_uses_sockets_or_says_so(transport: str):
    def no_space(*_) -> None:
        raise OSError(28, "No space left on device")

    def swap(cluster) -> str:
        use_transport(transport)

        def work() -> None:
            all_reduce(x := torch.ones(300_000))
            assert (x == 2).all()
            if cluster.rank == 0:
                send(x, 1)
                recv(x, 1)
            else:
                recv(x, 0)
                send(x, 0)

        with replaced("os.posix_fallocate", no_space) if cluster.rank == 1 else nullcontext():
            text = error_text(work)
        return text or " ".join(sorted(transports_of("ring") | transports_of("direct")))

    zero, one = outcomes(swap, 2, group_timeout=5)
    if transport == "auto":
        assert zero == one == "shared_memory sockets"
    else:
        assert zero  # it may only notice that rank 1 has left
        assert "not enough memory for a shared segment" in one
        assert one.endswith("(No space left on device); free some, or use another transport.")


def test_a_transport_that_does_not_exist_is_refused():
    with pytest.raises(
        CommError, match="no transport 'pigeon'; choose one of auto, shared_memory, sockets, gloo"
    ):
        use_transport("pigeon")


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_late_rank_raises_the_same_mismatch_though_the_others_have_read_its_header_and_end(transport: str):
    target = "comm.collectives._shard_fits" if transport == "gloo" else "comm.transport.streams.Streams._move"

    def differ(cluster) -> None:
        use_transport(transport)
        x = torch.ones(100_000)
        all_reduce(x)
        plain = collectives._shard_fits if transport == "gloo" else Streams._move
        calls = 0

        def late(*args) -> bool:
            nonlocal calls
            calls += 1
            if calls == (1 if transport == "gloo" else 2):  # its header has left
                time.sleep(0.3)
            return plain(*args)

        with replaced(target, late) if cluster.rank == 1 else nullcontext():
            all_reduce(x[cluster.rank :])

    texts = [text.strip() for text in outcomes(differ, 3, group_timeout=20)]
    assert len({text.rsplit("Mismatch: ")[-1] for text in texts}) == 1, texts
    assert "rank 1: all_reduce(ring, sum) of 99999 elements" in texts[0]


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
