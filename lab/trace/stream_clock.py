"""Measure when a GPU reached a point of its stream, on the host's clock.

      host      | launch | launch |              | wait |             far ahead of the device
      stream          |■■■■ forward ■■■■|■■■■■■■ backward ■■■■■■■|
                      ^ mark            ^ mark                   ^ mark

The host's clock shows when work was launched, not when it was done. A mark is a CUDA event between two
kernels, at which the device records the time. The host's time is known for one event, the anchor.
"""

import time

import torch


class StreamClock:
    """Convert marks in the streams of one GPU to nanoseconds of `time.perf_counter_ns`, at most 20 us late.

    The two clocks drift apart: so set the anchor again from time to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.set_anchor()

    def set_anchor(self) -> None:
        """Wait for the device, and compare the clocks. Read all older marks before this call."""
        torch.cuda.synchronize(self._device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """Return a new mark, after all work that the calling thread has launched on its current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_own_stream(self) -> bool:
        """Return whether the calling thread has chosen another stream than the default one."""
        return torch.cuda.current_stream(self._device) != torch.cuda.default_stream(self._device)

    def read(self, mark: torch.cuda.Event) -> int:
        """Wait until the device reaches a mark, and return the time."""
        mark.synchronize()
        return self._anchor_ns + round(self._anchor.elapsed_time(mark) * 1e6)


def time_when_done(device: torch.device | None) -> int:
    """Wait until the device, if it is a GPU, has finished all work; return `time.perf_counter_ns`."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
