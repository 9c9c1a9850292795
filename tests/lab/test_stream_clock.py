"""On a GPU a span lasts as long as the device works, not as long as the host takes to launch the work."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.trace.meter import Meter
from lab.trace.overlap import overlap_of
from lab.trace.timeline import mark, record, recorded, span, start_recording, stop_recording
from tests.lab.simulated_gpu import MS, SimulatedGpu, Stream, simulated_gpu


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu
        start_recording()
        stop_recording()


def test_a_span_lasts_from_the_work_of_its_block_to_its_end_and_waits_show(gpu: SimulatedGpu):
    """nccl's wait() blocks the stream, not the host."""
    wire = Stream(gpu)
    start_recording(gpu.device)
    start = gpu.host_ns
    with span("backward", "backward"):
        gpu.launch(10)
        wire.wait_for(gpu.compute)
        launched = mark()
        wire.launch(20)
        with gpu.on(wire):
            arrived = mark()
        gpu.launch(5)
    record("all_reduce", "communication", launched, arrived, lane="communication")
    with span("wait", "wait"):
        gpu.compute.wait_for(wire)
    with span("step", "optimizer"):
        gpu.launch(1)
    assert gpu.host_ns == start, "recording must not wait for the device"
    seen = overlap_of(recorded())
    times = {one.name: ((one.start_ns - start) / MS, (one.end_ns - start) / MS) for one in recorded()}
    assert times == {"backward": (0, 15), "all_reduce": (10, 30), "wait": (15, 30), "step": (30, 31)}
    assert (seen.compute_seconds, seen.communication_seconds, seen.hidden_share) == (0.016, 0.02, 0.25)


def test_a_step_ends_when_the_device_has_done_what_the_step_launched(gpu: SimulatedGpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    cluster = Cluster(0, 1, 0, gpu.device, dist.HashStore())
    meter = Meter(cluster, "test", steps=3, tokens_per_step=1, warmup=0)
    gpu.launch(100)  # before the first step, and not its own
    for _ in range(3):
        with meter.step() as record:
            gpu.launch(7)
            record.loss = 1.0
    assert meter.finish()["step_seconds"] == 0.007
    assert all(end - start == 7 * MS for start, end in meter.windows)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(meter.windows))
