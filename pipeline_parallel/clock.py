"""The passes of a stage by the clock: nothing is computed, and time passes as if each rank had a device.

      device   |--- F0 ---|--- F1 ---|          |--- B0 ---|     tick by tick; idle where an input is missing
      host      post   send post   send   wait       send        real messages of the true size

A device works through what it is given while its host is ahead, as GPUs do: a pass whose input is there
begins when the one before has ended, not when this process has its turn on one of too few cores. Where the
host had to wait for the input, the pass begins when it has come.
"""

import time

import torch
from torch import Tensor

HARDLY = 0.01  # of a tick: who waited less has not waited, but asked


class Clock:
    """The device of one rank; all its stages share it."""

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None  # start and end, nanoseconds
        self._free_at = 0

    def begin_step(self) -> None:
        """A step begins now, whatever was before."""
        self._free_at = time.perf_counter_ns()

    def run(self, seconds: float, waited: float) -> None:
        """Compute for so long; the host has waited so long for the input. Returns when it is done."""
        start = time.perf_counter_ns() if waited > HARDLY * seconds else self._free_at
        self._free_at = start + round(seconds * 1e9)
        self.last = start, self._free_at
        time.sleep(max(0, self._free_at - time.perf_counter_ns()) / 1e9)


class ClockPasses:
    """The passes of a stage (passes.py) on a clock: each takes `seconds`, a whole backward twice that.

    What it passes on are zeros, in the shape of `output_like` and `input_like`.
    """

    def __init__(
        self,
        clock: Clock,
        output_like: Tensor,
        input_like: Tensor,
        seconds: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self.clock, self.seconds, self._waited = clock, seconds, 0.0
        self._y = torch.zeros(output_like.shape, dtype=output_like.dtype, device=device)
        self._dx = torch.zeros(input_like.shape, dtype=input_like.dtype, device=device)

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        self._run(1)
        return self._y if target is None else self._y.new_zeros(())

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor:
        self._run(2)
        return self._dx

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor:
        self._run(1)
        return self._dx

    def backward_weight(self, microbatch: int) -> None:
        self._run(1)

    def deferred(self, microbatch: int) -> list[Tensor]:
        return []

    def begin_step(self) -> None:
        self.clock.begin_step()

    def has_waited(self, seconds: float) -> None:
        self._waited = seconds

    def when(self) -> tuple[int, int] | None:
        return self.clock.last

    def _run(self, ticks: int) -> None:
        self.clock.run(ticks * self.seconds, self._waited)
