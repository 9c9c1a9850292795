"""Every pattern is right however late its messages move, and keeps a tensor as it is until it has left.

A tensor belongs to the transport from `isend` until `wait` returns. A real transport mostly has read it long
before, so a pattern that changes it too early is right nearly always. Here the ranks are threads, and a
message moves only when all ranks wait: one that chance chooses.
"""

import itertools
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm.algorithms import hypercube, pipelined_ring, ring, sharded_tree, star, tree
from comm.shards import shards_of
from tests.comm.segments import short_segments

ALL_REDUCES = (
    *((file, "all_reduce") for file in (star, tree, ring, pipelined_ring)),
    *((hypercube, name) for name in ("recursive_doubling", "halving_doubling")),
)
NUMEL = 21
in_short_segments = short_segments(32)  # of 4 numbers


class LateTransfer:
    def __init__(self, wire: "LateWire", tensor: torch.Tensor) -> None:
        self._wire, self.tensor, self.before, self.done = wire, tensor, tensor.clone(), not tensor.numel()

    def wait(self) -> None:
        self._wire.network.wait(self._wire.rank, self)


Queues = defaultdict[tuple[int, int], deque[LateTransfer]]  # by source and destination


class LateWire:
    def __init__(self, network: "LateNetwork", rank: int, size: int) -> None:
        self.network, self.rank, self.size = network, rank, size

    def isend(self, tensor: torch.Tensor, dst: int) -> LateTransfer:
        return self.network.post(self.network.sends, (self.rank, dst), LateTransfer(self, tensor))

    def irecv(self, tensor: torch.Tensor, src: int) -> LateTransfer:
        return self.network.post(self.network.receives, (src, self.rank), LateTransfer(self, tensor))


class LateNetwork:
    """The messages of all ranks. `seed` decides in which order they move."""

    def __init__(self, size: int, seed: int) -> None:
        self._random, self._changed, self._num_running = random.Random(seed), threading.Condition(), size
        self.sends: Queues = defaultdict(deque)
        self.receives: Queues = defaultdict(deque)
        self._awaited: dict[int, LateTransfer] = {}
        self.errors: list[BaseException] = []

    def post(self, queues: Queues, pair: tuple[int, int], transfer: LateTransfer) -> LateTransfer:
        with self._changed:
            if not transfer.done:
                queues[pair].append(transfer)
        return transfer

    def wait(self, rank: int, transfer: LateTransfer) -> None:
        with self._changed:
            if not transfer.done:
                self._awaited[rank] = transfer
                self._stop_running()
                self._changed.wait_for(lambda: transfer.done or self.errors, 20)
            if self.errors:
                raise self.errors[0]

    def run(self, rank: int, work: Callable[[], object]) -> None:
        """Do the work of a rank, and keep its error."""
        try:
            work()
            with self._changed:
                unread = [dst for (src, dst), sends in self.sends.items() if src == rank and sends]
            assert not unread, f"rank {rank} has ended before its send to rank {unread[0]} had"
        except BaseException as error:
            self.errors.append(error)
        with self._changed:
            self._stop_running()
            self._changed.notify_all()

    def _stop_running(self) -> None:
        self._num_running -= 1
        while not self._num_running and self._awaited and not self.errors:
            pairs = [pair for pair, sends in self.sends.items() if sends and self.receives[pair]]
            assert pairs, f"the ranks {sorted(self._awaited)} wait for each other"
            src, dst = self._random.choice(pairs)
            sent, received = self.sends[src, dst].popleft(), self.receives[src, dst].popleft()
            is_kept = torch.equal(sent.tensor, sent.before)
            assert is_kept, f"rank {src} has changed a tensor before its send to rank {dst} had ended"
            received.tensor.copy_(sent.tensor)
            sent.done = received.done = True
            for rank in [rank for rank, transfer in self._awaited.items() if transfer.done]:
                del self._awaited[rank]
                self._num_running += 1
        self._changed.notify_all()


def check(what: str, work: Callable[[Any, list[torch.Tensor]], list[tuple[torch.Tensor, Any]]]) -> None:
    """Run `work` on 2 to 5 ranks. It returns pairs (got, expected)."""
    for n, seed in itertools.product((2, 3, 4, 5), range(3)):
        network = LateNetwork(n, seed)

        def on_a_rank(rank: int, n: int = n, network: LateNetwork = network) -> None:
            # A rank's term is a digit of a number, so a sum shows whose terms it has.
            of_ranks = [(torch.arange(NUMEL) % 3 + 1) * 10**r for r in range(n)]
            for got, expected in work(LateWire(network, rank, n), of_ranks):
                assert torch.equal(got, expected), f"{what}, rank {rank} of {n}: {got}, not {expected}"

        threads = [
            threading.Thread(target=network.run, args=(rank, lambda rank=rank: on_a_rank(rank)))
            for rank in range(n)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if network.errors:
            raise network.errors[0]


@in_short_segments
def test_an_all_reduce_does_not_change_what_is_still_being_sent():
    for file, name in ALL_REDUCES:

        def work(wire, of_ranks, file=file, name=name):
            expected, full = sum(of_ranks), of_ranks[wire.rank].clone()
            getattr(file, name)(wire, full, "sum")
            return [(full, expected)]

        check(f"{name} of {file.__name__}", work)


@in_short_segments
@pytest.mark.parametrize("file", [ring, pipelined_ring, sharded_tree])
def test_the_halves_of_an_all_reduce_do_not_change_what_is_still_being_sent(file):
    def work(wire, of_ranks):
        own, expected = of_ranks[wire.rank].clone(), shards_of(sum(of_ranks), wire.size)[wire.rank]
        shard, full = torch.empty_like(expected), torch.empty_like(own)
        file.reduce_scatter(wire, shard, own, "sum")
        file.all_gather(wire, full, shard)
        return [(shard, expected), (own, of_ranks[wire.rank]), (full, sum(of_ranks))]

    check(file.__name__, work)
