"""PyTorch's own collectives on a GPU end when nccl's stream has done them, also with a slow link."""

from collections.abc import Callable
from unittest import mock

import torch

from comm.cost import Link
from comm.wire import native, slow_link
from comm.wire.staging import Handover, handover_of, taken
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.overlap import Overlap, overlap_of
from lab.trace.timeline import recorded, span, start_recording, stop_recording
from tests.lab.simulated_gpu import MS, SimulatedGpu, Stream, simulated_gpu


class NcclWork:
    """An all-reduce of 20 ms. As nccl's, its future is complete at once, and callbacks run on a stream that
    waits for the operation."""

    def __init__(self, gpu: SimulatedGpu, wire: Stream) -> None:
        self._gpu, self._wire = gpu, wire
        wire.wait_for(gpu.current)
        wire.launch(20)

    def wait(self) -> None:
        self._gpu.current.wait_for(self._wire)

    def get_future(self) -> "NcclWork":
        return self

    def value(self) -> None:
        pass

    def add_done_callback(self, callback: Callable[["NcclWork"], None]) -> None:
        with self._gpu.on(self._wire):
            callback(self)


def test_what_nccl_does_beside_the_backward_is_hidden_and_what_the_stream_waits_for_is_not():
    def measure(cluster: Cluster) -> Overlap:
        with simulated_gpu() as gpu:
            wire = Stream(gpu)
            with mock.patch.object(native.dist, "all_reduce", lambda *_, **__: NcclWork(gpu, wire)):
                start_recording(gpu.device)
                with span("backward", "backward"):
                    gpu.launch(10)
                    handle = native.all_reduce(torch.zeros(4), "sum", None, async_op=True)
                    gpu.launch(5)
                handle.wait()
                stop_recording()
            return overlap_of(recorded())

    assert run_ranks(measure, 1) == [Overlap(0.015, 0.02, 0.005)]


def test_behind_a_slow_link_it_starts_when_its_tensor_is_computed_and_ends_when_the_wire_has_done_it():
    """It runs on another thread, whose stream knows nothing of the caller's."""

    def measure(cluster: Cluster) -> float:
        with simulated_gpu() as gpu:
            start, wire = gpu.host_ns, Stream(gpu)

            def all_reduce(*_: object, **__: object) -> NcclWork:
                gpu.launch(500)  # what the caller goes on with, meanwhile
                return NcclWork(gpu, wire)

            with slow_link.slowed(Link(0.0, 1e-12)), mock.patch.object(native.dist, "all_reduce", all_reduce):
                gpu.launch(10)
                native.all_reduce(torch.zeros(4), "sum", None, async_op=False)
            return (gpu.host_ns - start) / MS

    assert run_ranks(measure, 1) == [10 + 20]


def test_another_thread_waits_for_what_was_launched_before_and_not_for_what_comes_after():
    with simulated_gpu() as gpu:
        start, elapsed = gpu.host_ns, []
        gpu.launch(10)
        handover = Handover(gpu.device)
        gpu.launch(500)
        with taken(handover):
            elapsed.append(gpu.host_ns - start)
            gpu.current.launch(2)  # a copy
        elapsed.append(gpu.host_ns - start)
    assert elapsed == [10 * MS, 12 * MS]
    assert handover_of([torch.zeros(3), torch.zeros(2)]) is None  # in host memory
