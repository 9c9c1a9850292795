"""Run an algorithm of comm on threads that stand for ranks, and note its messages."""

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Transfer:
    """A message that has left or has still to arrive."""

    def __init__(self, tensor: torch.Tensor, source: "queue.Queue[torch.Tensor] | None" = None) -> None:
        self.tensor, self._source = tensor, source

    def wait(self) -> None:
        if self._source is not None:
            self.tensor.copy_(self._source.get(timeout=20))


class RecordingWire:
    """Offers what algorithms use of comm.wire.wire.Wire, and lists (to, elements) of each send."""

    def __init__(
        self, rank: int, size: int, links: dict[tuple[int, int], "queue.Queue[torch.Tensor]"]
    ) -> None:
        self.rank, self.size, self._links = rank, size, links
        self.sent: list[tuple[int, int]] = []

    def isend(self, tensor: torch.Tensor, to: int) -> Transfer:
        self.sent.append((to, tensor.numel()))
        self._links[self.rank, to].put(tensor.clone())
        return Transfer(tensor)

    def irecv(self, tensor: torch.Tensor, source: int) -> Transfer:
        return Transfer(tensor, self._links[source, self.rank])


def sends_of(algorithm: Callable[..., Any], ranks: int, numel: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the (to, elements) of its sends in an all-reduce, in order."""
    links: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
    for pair in [(a, b) for a in range(ranks) for b in range(ranks)]:
        links[pair] = queue.Queue()
    wires = [RecordingWire(rank, ranks, links) for rank in range(ranks)]
    tensors = [torch.full((numel,), float(rank)) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(lambda wire, tensor: algorithm(wire, tensor, "sum"), wires, tensors))
    assert all(tensor.eq(ranks * (ranks - 1) / 2).all() for tensor in tensors)
    return [wire.sent for wire in wires]
