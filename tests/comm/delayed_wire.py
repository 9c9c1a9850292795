"""Run the ranks of an algorithm in one process, and move each message as late as `wait` allows, or earlier.

A tensor belongs to the transport from `isend` until `wait` returns. A real transport mostly has read it long
before, so a pattern that changes it too early is right nearly always. Here a source of random numbers decides
when a message moves. It is an error if the tensor of a message has changed since `isend`, or if a rank ends
before its messages have left, because the caller may then change the tensors.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class Ended(BaseException):
    """End the thread of a rank after another one has failed."""


@dataclass(eq=False)
class DelayedTransfer:
    """A message in flight. `before` is a copy of what is sent."""

    wire: "DelayedWire"
    tensor: torch.Tensor
    before: torch.Tensor | None = None
    done: bool = False

    def wait(self) -> None:
        self.wire.pause(self)


@dataclass(eq=False)
class DelayedWire:
    """The wire of one rank. Whenever the rank uses it, another rank may go on, or a message may move."""

    ranks: "DelayedRanks"
    rank: int
    size: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    awaited: DelayedTransfer | None = None

    def isend(self, tensor: torch.Tensor, dst: int) -> DelayedTransfer:
        transfer = DelayedTransfer(self, tensor, tensor.clone(), done=not tensor.numel())
        return self._post(self.ranks.sends[self.rank, dst], transfer)

    def irecv(self, tensor: torch.Tensor, src: int) -> DelayedTransfer:
        transfer = DelayedTransfer(self, tensor, done=not tensor.numel())
        return self._post(self.ranks.receives[src, self.rank], transfer)

    def _post(self, queue: deque[DelayedTransfer], transfer: DelayedTransfer) -> DelayedTransfer:
        if not transfer.done:
            queue.append(transfer)
            self.pause(None)
        return transfer

    def pause(self, until: DelayedTransfer | None) -> None:
        """Let others go on, at least until a transfer is done."""
        self.awaited = until
        self.ranks.turn.release()
        self.turn.acquire()
        if self.ranks.has_failed:
            raise Ended


class DelayedRanks:
    """The ranks of one run. One of them works at a time, or one message moves, as `seed` decides."""

    def __init__(self, size: int, seed: int) -> None:
        self._source = random.Random(seed)
        self._late = self._source.choice((1.0, 0.9, 0.5))  # 1: a message moves only if no rank can go on
        self.turn = threading.Semaphore(0)
        self.has_failed = False
        self.sends: dict[tuple[int, int], deque[DelayedTransfer]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[DelayedTransfer]] = defaultdict(deque)
        self._wires = [DelayedWire(self, rank, size) for rank in range(size)]
        self._ended: dict[int, BaseException | None] = {}

    def run(self, work: Callable[[DelayedWire], None]) -> None:
        """Call `work` on all ranks. Raise the first error, or AssertionError if the ranks hang."""
        threads = [threading.Thread(target=self._work, args=(wire, work)) for wire in self._wires]
        for thread in threads:
            thread.start()
        try:
            while len(self._ended) < len(threads):
                self._step()
        finally:
            self.has_failed = True
            for wire in self._wires:
                wire.turn.release()
            for thread in threads:
                thread.join()

    def _work(self, wire: DelayedWire, work: Callable[[DelayedWire], None]) -> None:
        wire.turn.acquire()
        error: BaseException | None = None
        try:
            if not self.has_failed:
                work(wire)
        except BaseException as raised:
            error = raised
        self._ended[wire.rank] = error
        self.turn.release()

    def _step(self) -> None:
        ready = [w for w in self._wires if w.rank not in self._ended and (not w.awaited or w.awaited.done)]
        pairs = [pair for pair, sends in self.sends.items() if sends and self.receives[pair]]
        assert ready or pairs, f"the ranks hang: {sorted(self._ended)} have ended, the others wait"
        if ready and (not pairs or self._source.random() < self._late):
            wire = self._source.choice(ready)
            wire.turn.release()
            self.turn.acquire()
            if wire.rank in self._ended:
                self._check_end(wire.rank)
        else:
            self._move(*self._source.choice(pairs))

    def _check_end(self, rank: int) -> None:
        if error := self._ended[rank]:
            raise error
        unread = [dst for (src, dst), sends in self.sends.items() if src == rank and sends]
        assert not unread, f"rank {rank} has ended before its send to rank {unread[0]} had"

    def _move(self, src: int, dst: int) -> None:
        sent, received = self.sends[src, dst].popleft(), self.receives[src, dst].popleft()
        assert sent.before is not None and sent.tensor.shape == received.tensor.shape, (src, dst)
        is_kept = torch.equal(sent.tensor, sent.before)
        assert is_kept, f"rank {src} has changed a tensor before its send to rank {dst} had ended"
        received.tensor.copy_(sent.tensor)
        sent.done = received.done = True
