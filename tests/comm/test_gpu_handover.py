"""Another thread uses a GPU's tensors as soon as they are computed, and not later."""

import torch

from comm.wire.staging import Handover, handover_of, taken
from tests.lab.simulated_gpu import MS, simulated_gpu


def test_it_waits_for_what_was_launched_before_and_not_for_what_comes_after():
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


def test_tensors_in_host_memory_need_none():
    assert handover_of([torch.zeros(3), torch.zeros(2)]) is None
    with taken(None):
        pass
