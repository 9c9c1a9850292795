"""If a peer dies, sleeps or leaves, the others name it in a sentence, no rank hangs, and nothing is left."""

import json
import os
import signal
import socket
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm import collectives, rendezvous
from comm.collectives import all_reduce
from comm.errors import CommError
from comm.exchange import on_all
from comm.membership import liveness, meeting
from comm.point_to_point import recv
from comm.same_start import check_same_start
from comm.script import joined
from comm.wire import shared_memory
from comm.wire.transport import use_transport
from lab.ranks import RankError, run_ranks
from lab.replace import replaced
from tests.comm.helpers import error_text, over
from tests.comm.places import places, started
from tests.on_ranks import on_ranks

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
    [("ring", "auto"), ("tree", "sockets"), ("torch", "gloo")],
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


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_rank_that_dies_while_its_messages_are_on_their_way_is_an_error_and_never_garbage(transport: str):
    def one_dies(cluster) -> str:
        x = torch.full((3_000_000,), float(cluster.rank))
        collectives.broadcast(x, root=1)
        if cluster.rank == 1:
            x.fill_(7)
            with replaced("comm.wire.streams.Streams.finish", die):
                all_reduce(x, pattern="flat")
        text = error_text(lambda: all_reduce(x, pattern="flat"))
        return text or f"values {sorted(set(x.tolist()))}"

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 3)
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
@on_ranks(3)
def test_mismatches_leave_no_connection_and_no_memory_behind(cluster):
    counts = []
    for _ in range(4):
        for transport in ("shared_memory", "sockets"):
            use_transport(transport)
            with pytest.raises(CommError):
                all_reduce(torch.ones(1 + cluster.rank))
            all_reduce(torch.ones(3))
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts[1:])) == 1


PROMPTLY = 20  # seconds; the timeouts below are 50
POINTS = {
    "after its first word": "comm.membership.meeting.Meeting.wait_for_all",
    "before the group forms": "torch.distributed.init_process_group",
    "after the group has formed": "comm.rendezvous.Cluster",
    "before its data is compared": "comm.same_start.data_digest",
    "before it connects to a peer": "comm.wire.streams.Streams._connect",
    "before a reduction of torch's own": "torch.distributed.all_reduce",
}


def script(cluster, victim: int, target: str) -> None:
    meeting._LINGER = 0.2
    with ExitStack() as dying:
        if cluster.rank == victim:
            dying.enter_context(replaced(target, die))
        with joined():
            check_same_start(torch.arange(8), {})
            for pattern in ("pipelined_ring", "torch"):
                collectives.all_reduce(torch.ones(100), pattern=pattern)


def by_hand(function, world_size: int, *args: object) -> list[Any]:
    """Run a function on ranks that are started by hand, whose timeouts are long: no error may need them."""
    environments = places(list(range(world_size)), world_size, JOIN_TIMEOUT=50, OP_TIMEOUT=50)
    return started(function, environments, *args)


def printed_lines(
    capfd: pytest.CaptureFixture[str], function, world_size: int, *args: object
) -> dict[int, list[str]]:
    """Return the lines that each rank printed, without those of the rendezvous."""
    by_hand(function, world_size, *args)
    lines = capfd.readouterr().err.splitlines()
    lines = [
        line
        for line in lines
        if not any(word in line for word in (": here as", "still waiting", "all have met", "ranks have"))
    ]
    return {rank: [line for line in lines if line.startswith(f"[rank {rank}]")] for rank in range(world_size)}


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> None:
    run_ranks(lambda cluster: None, 1)  # what is timed below is not the import of torch


@pytest.mark.parametrize(("point", "victim"), [*((point, 1) for point in POINTS), (list(POINTS)[2], 0)])
def test_a_rank_that_dies_at_the_start_is_named_at_once_by_each_other_one(point, victim, capfd):
    start = time.monotonic()
    lines = printed_lines(capfd, script, 3, victim, POINTS[point])
    assert time.monotonic() - start < PROMPTLY
    for rank in {0, 1, 2} - {victim}:
        [sentence] = lines[rank]
        assert sentence.endswith(f"rank {victim} has died, so look for the first error in its log.")


def wait_for_an_end(*args: object, **kwargs: object) -> None:
    liveness.cause(patience=30)
    os._exit(0)


def with_one_stuck(cluster) -> None:
    os.environ["OP_TIMEOUT"] = "1"
    with ExitStack() as stuck:
        if cluster.rank == 1:
            stuck.enter_context(replaced("torch.distributed.init_process_group", wait_for_an_end))
        stuck.enter_context(joined())


def test_a_rank_that_is_stuck_while_the_group_forms_is_named_after_the_timeout(capfd):
    [sentence] = printed_lines(capfd, with_one_stuck, 3)[0]
    assert "The group cannot form: rank 1 joined but did not go on" in sentence
    assert "(OP_TIMEOUT is 1 s)" in sentence


def send_slowly(connection: Any, message: dict[str, Any], send: Any = liveness.send) -> None:
    send(connection, message)
    time.sleep(0.1)  # as if the thread had lost its core


def in_a_ring(cluster, pattern: str) -> None:
    place = rendezvous.join()
    collectives.barrier()
    if place.rank == 2:
        die()
    with replaced("comm.membership.liveness.send", send_slowly):
        collectives.all_reduce(torch.ones(10), pattern=pattern)


def test_all_survivors_name_the_rank_that_died_and_not_their_own_neighbour():
    for pattern in ("pipelined_ring", "torch"):
        errors = by_hand(in_a_ring, 4, pattern)
        for rank in (0, 1, 3):
            text = sentence(str(errors[rank])).strip()
            assert text.startswith(f"all_reduce ({pattern}): rank {rank} ")
            assert text.endswith(": rank 2 has died, so look for the first error in its log.")


def uneven(cluster, short: int) -> None:
    place = rendezvous.join()
    try:
        for _ in range(2 if place.rank == short else 3):
            collectives.all_reduce(torch.ones(10))
    except CommError as error:
        liveness.fail(str(error))  # as scripts do; without it this rank would have died
        raise
    rendezvous.leave(place)


def test_all_ranks_learn_that_a_rank_has_finished():
    for short in (0, 2):
        start = time.monotonic()
        ends = by_hand(uneven, 3, short)
        assert time.monotonic() - start < PROMPTLY
        assert ends.pop(short) is None
        for error in ends:
            why = f"rank {short} has finished, and every rank must take the same number of steps."
            assert sentence(str(error)).strip().endswith(f": {why}")
            assert "has failed" not in str(error)


def in_a_pipeline(cluster, is_killed: bool) -> None:
    """Each rank waits for a message of the next one, and the last rank ends."""
    with joined() as place:
        collectives.barrier()
        if place.rank == 3 and is_killed:
            die()
        if place.rank == 3:
            raise ZeroDivisionError("the loss is nan again")
        recv(torch.ones(10), place.rank + 1)


@pytest.mark.parametrize(
    ("is_killed", "cause"),
    [
        (True, "rank 3 has died, so look for the first error in its log."),
        (False, "rank 3 has failed: ZeroDivisionError: the loss is nan again."),
    ],
)
def test_every_rank_of_a_chain_names_the_rank_at_its_end_and_not_its_own_neighbour(is_killed, cause, capfd):
    start = time.monotonic()
    lines = printed_lines(capfd, in_a_pipeline, 4, is_killed)
    assert time.monotonic() - start < PROMPTLY
    for rank in range(3):
        [sentence] = lines[rank]
        assert f"rank {rank} could not receive from rank {rank + 1}: " in sentence
        assert sentence.endswith(cause)


def cannot_save(cluster) -> None:
    with joined() as place:
        on_all("begin", lambda: None)
        on_all("save it", die if place.rank == 1 else lambda: None)


def test_ranks_that_exchange_values_notice_a_death_at_once(capfd):
    start = time.monotonic()
    lines = printed_lines(capfd, cannot_save, 3)
    assert time.monotonic() - start < PROMPTLY
    assert any(lines[rank] for rank in (0, 2))
    says = "cannot save it: another rank has died or left (rank 1 has died, so look"
    assert all(says in sentence for rank in (0, 2) for sentence in lines[rank])


def test_a_connection_that_names_no_rank_is_ignored():
    store = dist.HashStore()
    liveness.connect(store, 0, 2)
    address = tuple(json.loads(store.get("liveness")))
    strangers = [socket.create_connection(address) for _ in range(4)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n[1]\n")
    strangers[2].close()
    strangers[3].sendall(b"\0")  # and no more
    other = Connection(socket.create_connection(address).detach())
    liveness.send(other, {"rank": 1})
    assert liveness.cause(patience=0) is None
    liveness.send(other, {"how": "failed", "why": "it has enough"})
    assert str(liveness.cause()) == "rank 1 has failed: it has enough"
    other.close()
    start = time.monotonic()
    liveness.finish()
    liveness.wait_for_the_others(5)
    assert time.monotonic() - start < 5
    liveness.forget()
