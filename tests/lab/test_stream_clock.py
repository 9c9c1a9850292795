"""On a GPU a span lasts as long as the device works, not as long as the host takes to launch the work."""

import _thread
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.trace import timeline
from lab.trace.gantt import MAIN_LANE
from lab.trace.meter import Meter
from lab.trace.overlap import overlap_of, per_step
from lab.trace.timeline import mark, record, recorded, settle, span, start_recording, stop_recording
from tests.lab.simulated_gpu import MS, SimulatedGpu, Stream, simulated_gpu


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu
        start_recording()
        stop_recording()


def times(zero: int) -> dict[str, tuple[float, float]]:
    """Return start and end of each recorded span by name, in ms since `zero`."""
    return {event.name: ((event.start_ns - zero) / MS, (event.end_ns - zero) / MS) for event in recorded()}


def test_a_span_lasts_as_long_as_the_device_works_on_what_its_block_launched(gpu: SimulatedGpu):
    start_recording(gpu.device)
    start = gpu.host_ns
    with span("forward", "forward"):
        gpu.launch(5)
    with span("backward", "backward"):
        gpu.launch(10)
    assert gpu.host_ns == start, "recording must not wait for the device"
    assert times(start) == {"forward": (0, 5), "backward": (5, 15)}


def test_the_time_in_which_the_device_waits_for_a_slow_host_belongs_to_the_block(gpu: SimulatedGpu):
    start_recording(gpu.device)
    start = gpu.host_ns
    with span("forward"):
        gpu.launch(5)
        gpu.sleep(8)
        gpu.launch(1)
    assert times(start) == {"forward": (0, 9)}


def test_what_a_stream_waits_for_shows_and_is_not_taken_for_computing(gpu: SimulatedGpu):
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
    seen = overlap_of(recorded())
    assert times(start) == {"backward": (0, 15), "all_reduce": (10, 30), "wait": (15, 30), "step": (30, 31)}
    assert (seen.compute_seconds, seen.communication_seconds, seen.hidden_share) == (0.016, 0.02, 0.25)


def test_threads_that_communicate_are_on_the_hosts_clock(gpu: SimulatedGpu):
    start_recording(gpu.device)
    start = gpu.host_ns
    gpu.launch(50)

    def work() -> None:
        with span("all_reduce", "communication"):
            gpu.sleep(3)

    thread = threading.Thread(target=work, name="communication")
    thread.start()
    thread.join()
    assert times(start) == {"all_reduce": (0, 3)}


def test_the_clocks_of_host_and_device_cannot_drift_apart_where_each_step_is_settled():
    with simulated_gpu(rate=1.0001) as gpu:
        start_recording(gpu.device)
        windows = []
        for _ in range(100):
            start = gpu.host_ns
            with span("step"):
                gpu.launch(1000)
            gpu.synchronize()
            windows.append((start, gpu.host_ns))
            settle()
        for (start, end), events in zip(windows, per_step(recorded(), windows), strict=True):
            (event,) = events
            assert 0 <= event.start_ns - start < MS / 5 and abs(event.end_ns - end) < MS / 5
        stop_recording()


def test_marks_are_read_when_a_step_is_settled_and_not_kept(gpu: SimulatedGpu):
    start_recording(gpu.device)
    with span("forward"):
        gpu.launch(5)
    assert len(timeline._unread) == 1
    settle()
    assert not timeline._unread and [event.duration_ns for event in recorded()] == [5 * MS]


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


def lane_of(on_thread: Callable[[Callable[[], None]], None]) -> str:
    """Return the lane of a span that a hook records in a backward which `on_thread` runs."""
    start_recording()
    x, done = torch.ones(1, requires_grad=True), threading.Event()

    def hook(_: torch.Tensor) -> None:
        with span("wait", "wait"):
            pass

    def backward() -> None:
        x.register_hook(hook)
        (2 * x).sum().backward()
        done.set()

    on_thread(backward)
    assert done.wait(10)
    (event,) = recorded()
    stop_recording()
    return event.lane


def test_what_hooks_do_on_autograds_own_thread_is_done_in_the_main_threads_time():
    """On a GPU a backward runs on a thread that Python has not started, and the main thread waits for it."""
    assert lane_of(lambda backward: _thread.start_new_thread(backward, ())) == MAIN_LANE
    assert lane_of(lambda backward: backward()) == MAIN_LANE


def test_a_backward_on_a_thread_of_pythons_is_that_threads():
    assert lane_of(lambda backward: threading.Thread(target=backward, name="mine").start()) == "mine"
