"""PyTorch's own collectives on a GPU: an operation ends when nccl's stream has done it."""

from collections.abc import Callable
from unittest import mock

import torch

from comm import native
from lab.cluster import Cluster
from lab.overlap import Overlap, overlap_of
from lab.ranks import run_ranks
from lab.timeline import recorded, span, start_recording, stop_recording
from tests.lab.simulated_gpu import SimulatedGpu, Stream, simulated_gpu


class NcclWork:
    """An all-reduce of 20 ms. As nccl's, its future is complete at once, and callbacks run on a stream that
    waits for the operation."""

    def __init__(self, gpu: SimulatedGpu, wire: Stream) -> None:
        self._gpu, self._wire = gpu, wire
        wire.wait_for(gpu.compute)
        wire.launch(20)

    def wait(self) -> None:
        self._gpu.compute.wait_for(self._wire)

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
            wire = gpu.stream()
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
