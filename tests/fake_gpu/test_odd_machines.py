"""Test what a user of unusual machines, or of one that breaks, is told."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lab.ranks import RankError
from tests.fake_gpu.ranks import SHORT, run_script

train = partial(run_script, "data_parallel/train_naive.py", *SHORT, BACKEND="")


def test_ranks_that_share_a_gpu_send_with_gloo_and_say_so(capfd: pytest.CaptureFixture[str]):
    for ranks, is_shared in ((1, False), (2, True)):
        assert train(ranks=ranks, FAKE_GPUS="1")["replicas_equal"] is True
        says = "2 ranks share 1 GPU on this machine, so they send with gloo." in capfd.readouterr().err
        assert says is is_shared


def answer_with_one_uuid() -> None:
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        uuid="GPU-XX", pci_domain_id=0, pci_bus_id=device.index, pci_device_id=0
    )


def be_of_amd() -> None:
    torch.version.hip = "7.0"
    answer_with_one_uuid()


def test_two_gpus_of_amd_that_answer_with_one_uuid_take_nccl_and_two_of_nvidia_are_one(capfd):
    assert train(prepare=be_of_amd)["replicas_equal"] is True
    assert "gloo" not in capfd.readouterr().err
    with pytest.raises(RankError):
        train(prepare=answer_with_one_uuid)
    assert "Ranks 0 and 1 share one GPU (GPU-XX), and nccl needs one for each" in capfd.readouterr().err


def have_a_driver_that_is_too_old() -> None:
    torch.version.cuda, exists = "13.0", os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidia0" or exists(path)


def test_a_gpu_that_a_torch_for_cuda_cannot_use_is_told_in_a_sentence(capfd):
    with pytest.raises(RankError):
        train(prepare=have_a_driver_that_is_too_old, FAKE_GPUS="0")
    told = capfd.readouterr().err
    assert "rank 0: There is an NVIDIA GPU, and torch, built for CUDA 13.0, cannot use it" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "script",
    [
        "data_parallel/train_bucket_overlap.py",
        "zero/train_zero3.py",
        "tensor_parallel/train_sequence_parallel.py",
        "pipeline_parallel/train_1f1b.py",
        "expert_parallel/train_moe.py",
        "low_communication/train_compressed.py",
        "low_communication/train_hsdp.py",
        "hybrid_parallel/train_hybrid.py",
    ],
)
def test_when_a_rank_is_killed_the_other_ends_with_a_sentence_that_names_it(script: str, capfd):
    """nccl's wait() does not raise: without the sentence the fake reports a deadlock after 25 seconds."""
    with pytest.raises(RankError):
        run_script(script, *SHORT, FAKE_DIE="1@9")
    told = capfd.readouterr().err
    assert "rank 0: rank 1 has died, so look for the first error in its log." in told
    assert "fake nccl:" not in told and "fake GPU:" not in told
