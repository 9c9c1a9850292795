"""Ranks get GPUs in turn, and too few GPUs are refused in a sentence."""

import tempfile
from unittest import mock

import cloudpickle
import pytest
import torch

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import child, run_ranks


def with_gpus(number: int) -> mock._patch:
    return mock.patch.multiple(torch.cuda, is_available=lambda: number > 0, device_count=lambda: number)


@pytest.mark.parametrize(
    "gpus, options, sentence",
    [
        (0, {"device": "cuda"}, "device='cuda'): this machine has no GPU; leave device out."),
        (2, {"device": "cuda:2"}, "device='cuda:2'): the last GPU of this machine is cuda:1."),
        (2, {"device": "gpu"}, "device='gpu'): it must be 'cpu' or 'cuda'."),
        (2, {"backend": "nccl"}, "backend='nccl'): nccl sends from GPUs only; add device='cuda'."),
        (2, {"backend": "nccl", "device": "cuda"}, "backend='nccl'): 3 ranks have 2 GPUs, and nccl needs"),
    ],
)
def test_devices_that_are_not_there_are_refused_in_a_sentence(gpus, options, sentence):
    with with_gpus(gpus), pytest.raises(WorkbookError) as error:
        run_ranks(lambda cluster: None, 3, **options)
    assert str(error.value).startswith(f"run_ranks({sentence}")


def test_a_rank_takes_its_gpu_before_nccl_connects_and_says_which_it_is_at_the_barrier():
    def start_the_last_of_two(cluster: Cluster) -> tuple[str, list[object]]:
        calls: list[object] = []
        with (
            tempfile.TemporaryDirectory() as folder,
            with_gpus(2),
            mock.patch.object(torch.cuda, "set_device", calls.append),
            mock.patch.object(child.dist, "init_process_group", lambda name, **_: calls.append(name)),
            mock.patch.object(child.dist, "barrier", lambda device_ids: calls.append(device_ids)),
        ):
            work = cloudpickle.dumps((lambda cluster: str(cluster.device), (), {}))
            return child._call(child.Job(1, 2, folder, "nccl", "cuda", 60.0, work, [], folder)), calls

    device = torch.device("cuda", 1)
    assert run_ranks(start_the_last_of_two, 1) == [("cuda:1", [device, "nccl", [1]])]
