"""Messages arrive in order whatever their ranks do, over any transport, and a send waits for its receive."""

import gc
import itertools
import os
import random
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from comm import collectives, point_to_point
from comm.cost import Link
from comm.point_to_point import irecv, isend, recv, send
from comm.wire import shared_memory, slow_link, sockets
from comm.wire.streams import transports_of
from comm.wire.transport import use_transport
from comm.wire.wire import Wire
from lab.ranks import RankError, run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.helpers import error_text
from tests.on_ranks import on_ranks


def test_a_ring_that_sends_first_never_ends_and_the_report_shows_where_each_rank_is_stuck():
    def ring(cluster) -> None:
        point_to_point.ring_send_first(torch.ones(10), torch.empty(10))

    with pytest.raises(RankError) as error:
        run_ranks(ring, 3, timeout=60, look_every=0.3)
    _, *parts = str(error.value).split(" is stuck ")
    assert len(parts) == 3
    for part in parts:
        assert "in wait: " in part
        assert "ring_send_first" in part
        assert "other thread" not in part


@pytest.mark.parametrize("ring", [point_to_point.ring_even_odd, point_to_point.ring_non_blocking])
def test_both_cures_bring_every_tensor_to_the_right_neighbour(ring):
    def turn(cluster) -> list[float]:
        got = []
        for numel in (1, 300_000):
            incoming = torch.empty(numel)
            ring(torch.full((numel,), float(cluster.rank)), incoming)
            assert (incoming == incoming[0]).all()
            got.append(incoming[0].item())
        return got

    for n in (2, 3):
        assert run_ranks(turn, n) == [[(rank - 1) % n] * 2 for rank in range(n)]


@on_ranks(2, timeout=20)
def test_messages_and_collectives_do_not_take_each_others_data(cluster):
    r = cluster.rank
    for collective in (collectives.all_reduce, collectives.broadcast):
        mail, tensor = torch.empty(4), torch.full((4,), float(r + 1))
        leaving = isend(torch.full((4,), 100.0 + r), 1 - r)
        collective(tensor)  # overtakes the mail, which no rank receives yet
        arriving = irecv(mail, 1 - r)
        handle = collective(tensor, async_op=True)
        for transfer in (arriving, leaving, handle):
            transfer.wait()
        assert mail.tolist() == [101.0 - r] * 4
        assert tensor.tolist() == [6.0 if collective is collectives.all_reduce else 1.0] * 4


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, so that only a copy of it can be sent."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def to(self, device: str) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_over_gloo_a_gpus_tensors_go_by_way_of_host_memory():
    def exchange(cluster) -> list[float]:
        for name in ("isend", "irecv"):
            plain = getattr(Wire, name)

            def in_host_memory(self, tensor, peer, header=False, plain=plain):
                assert type(tensor) is torch.Tensor
                return plain(self, tensor, peer, header)

            setattr(Wire, name, in_host_memory)
        got = []
        for transport, link in itertools.product(("auto", "gloo"), (None, Link(1e-4, 1e-9))):
            use_transport(transport)
            mine = torch.full((3,), float(cluster.rank)).as_subclass(OnGpu)
            theirs = torch.full((3,), -1.0).as_subclass(OnGpu)
            with slow_link.slowed(link):
                arriving, leaving = irecv(theirs, 1 - cluster.rank), isend(mine, 1 - cluster.rank)
                mine.fill_(9.0)  # it has been copied already
                arriving.wait()
                theirs += 10
                arriving.wait()  # a second time does not copy again
                leaving.wait()
            got += theirs.tolist()
        return got

    assert run_ranks(exchange, 2) == [[11.0] * 12, [10.0] * 12]


linux = pytest.mark.skipif(not shared_memory.is_possible(), reason="the segments are Linux's")

SIZES = [1, 1000, 100_000, 3_000_001]  # bytes: the ring buffer has 1 MiB
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@linux
@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "gloo"])
@on_ranks(2)
def test_a_send_of_any_size_is_done_only_when_the_message_was_received(cluster, transport: str):
    use_transport(transport)
    for size in SIZES:
        if cluster.rank == 0:
            thread = threading.Thread(target=isend(pattern(size, 1), 1).wait)
            thread.start()
            thread.join(0.1)
            assert thread.is_alive(), f"{size} bytes were sent, but no rank has received them"
            cluster.store.set(f"receive {size}", "")
            thread.join(30)
            assert not thread.is_alive()
        else:
            got = torch.zeros(size, dtype=torch.uint8)
            cluster.store.wait([f"receive {size}"])
            recv(got, 0)
            assert torch.equal(got, pattern(size, 1))
    assert transports_of("direct") == {transport}


@linux
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_sender_that_calls_nothing_after_isend_keeps_no_receiver_waiting(transport: str):
    sizes = [3_000_001, *[10_000] * 40, 1_000_000, *[1] * 2_000, 50_000]  # more than the buffer holds

    def busy(cluster) -> None:
        use_transport(transport)
        if cluster.rank == 0:
            transfers = [isend(torch.full((size,), at % 251, dtype=torch.uint8), 1) for at, size in at_sizes]
            cluster.store.wait(["received"])
            for transfer in transfers:
                transfer.wait()
        else:
            for at, size in at_sizes:
                got = torch.zeros(size, dtype=torch.uint8)
                recv(got, 0)
                assert (got == at % 251).all()
            cluster.store.set("received", "")

    at_sizes = list(enumerate(sizes))
    run_ranks(busy, 2)


words = st.tuples(
    st.integers(0, 2), st.integers(1, 2), st.integers(0, 60_000), st.sampled_from(DTYPES), st.booleans()
)


@linux
@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    letters=st.lists(words, min_size=5, max_size=40),
    transport=st.sampled_from(["auto", "sockets"]),
)
@on_ranks(3)
def test_any_messages_between_three_ranks_arrive_in_order(cluster, letters, transport: str):
    """Each letter is (source, distance to its destination, elements, dtype, whether its send blocks)."""
    use_transport(transport)
    arriving, leaving = [], []
    for at, (source, distance, numel, dtype, _) in enumerate(letters):
        if (source + distance) % 3 == cluster.rank:
            got = torch.full((numel,), 255).to(dtype)
            arriving.append((irecv(got, source), got, at))
    for at, (source, distance, numel, dtype, blocks) in enumerate(letters):
        if source == cluster.rank:
            leaving.append(isend(torch.full((numel,), at).to(dtype), (source + distance) % 3))
            if blocks:
                leaving[-1].wait()
    random.Random(len(letters)).shuffle(arriving)
    for transfer, got, at in arriving:
        transfer.wait()
        assert (got == at).all()
    for transfer in leaving:
        transfer.wait()


@on_ranks(3)
def test_groups_keep_their_messages_apart_and_members_are_counted_from_0(cluster):
    groups = [None, dist.new_group([0, 1, 2]), dist.new_group([0, 2])]
    if cluster.rank == 2:
        LEDGER.clear()
        leaving = [isend(torch.full((3,), float(value)), 0, group) for value, group in enumerate(groups)]
        assert LEDGER.rows() == {Entry("point_to_point", "direct"): Traffic(36, 3)}
        for transfer in leaving:
            transfer.wait()
    if cluster.rank == 0:
        places = [torch.zeros(3) for group in groups]
        sources = (2, 2, 1)  # rank 2 of all is rank 1 of the pair
        pending = [irecv(*each) for each in zip(places, sources, groups, strict=True)]
        for transfer in reversed(pending):
            transfer.wait()
        assert [place.tolist() for place in places] == [[float(value)] * 3 for value in range(3)]


@linux
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_message_of_another_size_is_a_sentence_and_never_garbage(transport: str):
    def differ(cluster, sent: int, expected: int) -> str:
        use_transport(transport)
        if cluster.rank == 0:
            return error_text(lambda: send(torch.ones(sent), 1))
        return error_text(lambda: recv(torch.empty(expected), 0))

    for sent, expected in ((10, 20), (50_000, 10)):
        texts = run_ranks(differ, 2, sent, expected, group_timeout=10)
        assert "could not send to rank 1: it lost the connection" in texts[0]
        assert texts[1] == (
            "point_to_point (direct): rank 1 could not receive from rank 0: "
            f"rank 1 expects {4 * expected} bytes from rank 0, which has sent {4 * sent}. Both need "
            "tensors of the same size and dtype."
        )


@linux
@on_ranks(3)
def test_a_group_that_is_freed_leaves_no_connection_and_no_thread_behind(cluster):
    counts = []
    for _ in range(4):
        group = dist.new_group([0, 1, 2])
        left, right = (cluster.rank - 1) % 3, (cluster.rank + 1) % 3
        for size in SIZES:
            arriving = irecv(torch.zeros(size, dtype=torch.uint8), left, group)
            isend(pattern(size, 0), right, group).wait()
            arriving.wait()
        dist.destroy_process_group(group)
        del group, arriving
        deadline = time.monotonic() + 10
        while any(one.name == "messages" for one in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gc.collect()
        counts.append(len(local_files()))
    assert len(set(counts)) == 1


def local_files() -> list[str]:
    """Return this process's shared memory, and its connections that are not gloo's."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    name = "Unix" if end.family == socket.AF_UNIX else ""
            found += [name] if name.startswith(("Unix", "/memfd")) else []
    return found


def test_what_cannot_be_sent_is_refused_in_a_sentence():
    def wrong(cluster) -> list[str]:
        gaps = torch.zeros(4, 4).T[:2]
        refusals = [error_text(lambda: call(gaps, 1 - cluster.rank)) for call in (isend, irecv)]
        for call in (isend, irecv):
            refusals += [error_text(lambda: call(torch.ones(3), peer)) for peer in (-1, 2, cluster.rank)]
        return [text.rpartition("asked to ")[2] for text in refusals]

    assert run_ranks(wrong, 2)[1] == [
        "point_to_point: call contiguous() on the tensor to send to a rank first.",
        "point_to_point: call contiguous() on the tensor to receive from a rank first.",
        "send to rank -1, but the group has ranks 0 to 1.",
        "send to rank 2, but the group has ranks 0 to 1.",
        "send to rank 1, which is itself.",
        "receive from rank -1, but the group has ranks 0 to 1.",
        "receive from rank 2, but the group has ranks 0 to 1.",
        "receive from rank 1, which is itself.",
    ]


HELLO = struct.Struct("!qq")


def arrivals(listener: sockets.Listener, seconds: float = 0.2) -> list[sockets.Arrival]:
    """Return what arrives within the time, and sooner if anything does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := listener.accept():
            return found
        time.sleep(0.001)
    return []


def test_strangers_are_not_let_in_and_keep_no_rank_out(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with replaced("comm.wire.sockets._HELLO_SECONDS", 0.02):
        listener = sockets.Listener(size=4)
        _, port, token = listener.address()
        source, strangers = random.Random(1), []
        wrong = [HELLO.pack(token ^ 1, 1), HELLO.pack(token, 4), HELLO.pack(token, -1), b"", b"abc"]
        for hello in [*wrong, *(source.randbytes(source.randrange(60)) for _ in range(20))]:
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(hello)
            assert arrivals(listener, 0.002) == []
        with sockets.connect(listener.address(), 1, 5.0, share=False)[0]:
            [(rank, connection, _)] = arrivals(listener)
            assert rank == 1
            connection.close()
        for stranger in strangers[:3]:
            stranger.settimeout(1)
            assert stranger.recv(1) == b"", "it is closed"
        for one in (*strangers, listener):
            one.close()
