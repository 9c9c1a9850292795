"""Simulate a GPU that computes nothing, in simulated time, for tests of its clock.

with simulated_gpu() as gpu:
    start_recording(gpu.device)
    with span("forward"):
        gpu.launch(5.0)              # takes the host no time, and the device 5 ms
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from comm.wire import staging as gpu_handover
from lab.trace import stream_clock, timeline

MS = 1_000_000


class Stream:
    """A queue of work that the device does one after the other."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu, self._free_at = gpu, 0

    @property
    def free_at(self) -> int:
        """Return the time at which all work of the stream will be done."""
        return max(self._free_at, self._gpu.host_ns)

    def launch(self, ms: float) -> None:
        self._free_at = self.free_at + round(ms * MS)

    def wait_for(self, other: "Stream") -> None:
        self._free_at = max(self.free_at, other.free_at)

    def record_event(self) -> "Event":
        event = Event(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.host_ns = self.free_at


class Event:
    """A mark in a stream; the device counts milliseconds in 32 bits."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu

    def record(self, stream: Stream) -> None:
        self.at = stream.free_at

    def synchronize(self) -> None:
        self._gpu.host_ns = max(self._gpu.host_ns, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert max(self.at, end.at) <= self._gpu.host_ns, "the device has not come so far yet"
        return float(torch.tensor((end.at - self.at) / MS, dtype=torch.float32))


class SimulatedGpu:
    """`host_ns` is the host's time: it passes when the host waits for the device."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.host_ns = 5_000 * MS
        self.compute = self.current = Stream(self)

    def perf_counter_ns(self) -> int:
        return self.host_ns

    def launch(self, ms: float) -> None:
        """Launch work of `ms` milliseconds on the compute stream."""
        self.compute.launch(ms)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one in a `with` block."""
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device | None = None) -> None:
        self.host_ns = max(self.host_ns, self.compute.free_at)


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Simulate torch.cuda, and the host's clock for spans and steps, in a `with` block."""
    gpu = SimulatedGpu()
    stubs = {
        "torch.cuda.Event": lambda enable_timing: Event(gpu),
        "torch.cuda.synchronize": gpu.synchronize,
        "torch.cuda.Stream": lambda device: Stream(gpu),
        "torch.cuda.stream": gpu.on,
        "torch.cuda.current_stream": lambda device=None: gpu.current,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_initialized": lambda: True,
    }
    with ExitStack() as patches:
        for name, stub in stubs.items():
            patches.enter_context(mock.patch(name, stub))
        # Not by name: to import these modules while torch's classes are stubs is a TypeError.
        patches.enter_context(mock.patch.object(stream_clock, "time", gpu))
        patches.enter_context(mock.patch.object(timeline, "now", gpu.perf_counter_ns))
        # A thread keeps its stream: that of another simulated GPU would have another clock.
        patches.enter_context(mock.patch.object(gpu_handover, "_streams", threading.local()))
        yield gpu
