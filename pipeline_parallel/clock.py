"""Run a stage by the clock: nothing is computed, and time passes as if each rank had a device of its own.

      device   |--- F0 ---|--- F1 ---|          |--- B0 ---|     tick by tick; idle where an input is missing
      host      post   send post   send   wait       send        real messages of the true size

A device works through what its host has queued, as GPUs do. So an action whose input is there begins when the
action before it has ended, and not when this process gets its turn on one of too few cores. If the host had
to wait for the input, the action begins when the input has come. The tensors that are sent hold no meaningful
numbers. Their first bytes say when they were made, and no action that uses them begins before that time.
"""

import ctypes
import sys
import time

import torch
from torch import Tensor

HARDLY = 0.01  # of an action's seconds: a shorter wait is only the time of the call
STAMP_BYTES = 8
PR_SET_TIMERSLACK = 29  # prctl(2): in nanoseconds, for this thread


class Clock:
    """Simulates the device of one rank, shared by its stages. Times are in ns, of time.perf_counter_ns."""

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None  # start and end of the last action
        self._free_at = 0
        if sys.platform == "linux":  # by default it wakes sleepers up to 50 us late, to wake several at once
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def begin_step(self) -> None:
        """Begin a step now, whatever the device did before."""
        self._free_at = time.perf_counter_ns()

    def begin(self, seconds: float, waited: float, made_at: int) -> int:
        """Begin an action that takes `seconds`, and return the time of its end.

        The host has waited `waited` seconds for the input, which was made at `made_at`.
        """
        now = time.perf_counter_ns()
        start = now if waited > HARDLY * seconds else min(now, max(self._free_at, made_at))
        end = self._free_at = start + round(seconds * 1e9)
        self.last = start, end
        return end

    def finish(self) -> None:
        """Sleep until the action is done."""
        time.sleep(max(0, self._free_at - time.perf_counter_ns()) / 1e9)


class ClockRunner:
    """Runs a stage on the clock: a forward, an input gradient and a weight gradient take `seconds` each.

    Its results have the shape and dtype of `output_like` and `input_like`.
    """

    def __init__(
        self,
        clock: Clock,
        output_like: Tensor,
        input_like: Tensor,
        seconds: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self.clock, self.seconds, self.device = clock, seconds, device
        self._output_like, self._input_like, self._waited = output_like, input_like, 0.0

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        return self._run(1, x if x.requires_grad else None, None if target is not None else self._output_like)

    def forward_only(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        return self.forward(0, x, target)

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor:
        return self._run(2, dy, self._input_like)

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor:
        return self._run(1, dy, self._input_like)

    def backward_weight(self, microbatch: int) -> None:
        self._run(1, None, None)

    def deferred_tensors(self, microbatch: int) -> list[Tensor]:
        return []

    def begin_step(self) -> None:
        self.clock.begin_step()

    def add_wait(self, seconds: float) -> None:
        self._waited = seconds

    def last_span(self) -> tuple[int, int] | None:
        return self.clock.last

    def _run(self, ticks: int, given: Tensor | None, like: Tensor | None) -> Tensor:
        made_at, waited = 0, self._waited
        if given is not None and given.nbytes >= STAMP_BYTES:
            asked = time.perf_counter_ns()
            made_at = int(_bytes_of(given).view(torch.int64))
            if given.is_cuda:  # after nccl's wait() only the stream waits; the host waited here
                waited += (time.perf_counter_ns() - asked) / 1e9
        end = self.clock.begin(ticks * self.seconds, waited, made_at)
        shape, dtype = ((), None) if like is None else (like.shape, like.dtype)
        made = torch.zeros(shape, dtype=dtype, device=self.device)
        if made.nbytes >= STAMP_BYTES:
            _bytes_of(made).copy_(torch.tensor([end]).view(torch.uint8))
        self.clock.finish()
        return made


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the first bytes of a tensor that a stage sends."""
    return tensor.detach().view(-1).view(torch.uint8)[:STAMP_BYTES]
