"""Ranks get GPUs in turn, and too few GPUs are refused in a sentence."""

from unittest import mock

import pytest
import torch

from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks


def with_gpus(number: int) -> mock._patch:
    return mock.patch.multiple(torch.cuda, is_available=lambda: number > 0, device_count=lambda: number)


@pytest.mark.parametrize(
    "gpus, options, sentence",
    [
        (0, {"device": "cuda"}, "device='cuda'): this machine has 0 GPUs."),
        (2, {"device": "gpu"}, "device='gpu'): it must be 'cpu' or 'cuda'."),
        (2, {"backend": "nccl"}, "backend='nccl'): nccl sends from GPUs only; add device='cuda'."),
        (2, {"backend": "nccl", "device": "cuda"}, "backend='nccl'): 3 ranks have 2 GPUs, and nccl needs"),
    ],
)
def test_devices_that_are_not_there_are_refused_in_a_sentence(gpus, options, sentence):
    with with_gpus(gpus), pytest.raises(WorkbookError) as error:
        run_ranks(lambda cluster: None, 3, **options)
    assert str(error.value).startswith(f"run_ranks({sentence}")
