"""Tell when a GPU did what it was told: moments of its stream, on the host's clock.

      host      | launch | launch |              | wait |             far ahead of the device
      stream          |■■■■ forward ■■■■|■■■■■■■ backward ■■■■■■■|
                      ^ mark            ^ mark                   ^ mark

A call that launches a kernel returns before the kernel has begun, so the host's clock says when the work was
launched, not when it was done. A mark is a CUDA event: it stands in the stream between two kernels, and the
device notes the time when it gets there. Two events give the time between them. For one of them, the anchor,
the host's time is known, and so it is for all others.
"""

import time

import torch

NS_PER_MS = 1_000_000


class StreamClock:
    """Reads marks in the streams of one GPU as nanoseconds of `time.perf_counter_ns`.

    A mark reads late by at most the time of a synchronisation, some 20 us, and never early. The two clocks
    drift apart, and the device's float counts milliseconds: set the anchor again from time to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.set_anchor()

    def set_anchor(self) -> None:
        """Wait for the device, and compare the clocks. Read all older marks before."""
        torch.cuda.synchronize(self._device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """Return a new mark, behind all that the calling thread's current stream has been given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, mark: torch.cuda.Event) -> int:
        """Return the time of a mark; waits until the device gets there."""
        mark.synchronize()
        return self._anchor_ns + round(self._anchor.elapsed_time(mark) * NS_PER_MS)


def time_when_done(device: torch.device | None) -> int:
    """Return `time.perf_counter_ns` once the device, if it is a GPU, has done all that it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
