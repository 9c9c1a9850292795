"""Run by the clock: nothing is computed, and time passes as if each rank had a device of its own.

      device   |--- F0 ---|--- F1 ---|          |--- B0 ---|     tick by tick; idle where an input is missing
      host      call       call   call            call           real messages of the true size

A device works through what its host has queued. So an action whose input was there in time begins when the
action before it has ended, and not when this process gets its turn on a core. The first bytes of a tensor say
when it was made, also on another rank.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STAMP_BYTES = 8
SLACK = 0.1  # of an action's seconds: a host that is later than that has waited for a slow link
PR_SET_TIMERSLACK = 29  # prctl(2): in nanoseconds, for this thread

Later = list[Callable[[], None]]


class DeviceClock:
    """Simulates the device of one rank, where a forward and each half of a backward take `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._free_at = 0
        if sys.platform == "linux":  # by default it wakes sleepers up to 50 us late, to wake several at once
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def forward(self, x: Tensor, made_like: Tensor | None, later: Later | None = None) -> Tensor:
        """Return a tensor like `made_like`, or a loss, after a tick. Its backward takes two ticks.

        With `later` the backward takes one tick, and appends a function to `later` that takes the other.
        """
        if not torch.is_grad_enabled():
            return self._run(1, x, made_like)
        return _Ticks.apply(x, torch.zeros((), requires_grad=True), self, made_like, later)

    def _run(self, ticks: int, given: Tensor | None, like: Tensor | None) -> Tensor:
        """Let ticks pass that need `given`, and return a tensor that says when they ended."""
        made_at = 0
        if given is not None and given.is_floating_point() and given.nbytes >= STAMP_BYTES:
            made_at = int(_stamp(given).view(torch.int64))  # on a GPU this waits until `given` is there
        now = time.perf_counter_ns()
        length = round(ticks * self.seconds * 1e9)
        is_late = made_at > self._free_at or now - self._free_at > SLACK * length
        start = now if is_late else self._free_at
        end = self._free_at = start + length
        made = torch.zeros(()) if like is None else torch.zeros(like.shape, dtype=like.dtype)
        made = made if given is None else made.to(given.device)
        if made.nbytes >= STAMP_BYTES:
            _stamp(made).copy_(torch.tensor([end]).view(torch.uint8))
        time.sleep(max(0, end - time.perf_counter_ns()) / 1e9)
        return made


class _Ticks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, clock: DeviceClock, made_like: Tensor | None, later: Later | None
    ) -> Tensor:
        ctx.clock, ctx.later, ctx.is_loss, ctx.like = clock, later, made_like is None, x.to("meta")
        return clock._run(1, x if x.requires_grad else None, made_like).to(x.device)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        clock, given = ctx.clock, None if ctx.is_loss else dy[0]
        dx = clock._run(2 if ctx.later is None else 1, given, ctx.like).to(dy[0].device)
        if ctx.later is not None:
            ctx.later.append(lambda: clock._run(1, None, None))
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None


def _stamp(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)[:STAMP_BYTES]
