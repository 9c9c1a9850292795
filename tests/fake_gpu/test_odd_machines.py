"""Test what a user of unusual machines, or of one that breaks, is told."""

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm.collectives import all_reduce
from comm.script import joined
from lab.cluster import Cluster
from lab.ranks import RankError
from tests.comm.places import places, started
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


def on_nccl(run: Callable[[Cluster], object], **variables: object) -> list[Any]:
    """Run a function on two ranks that have joined each other; return results and errors."""

    def join_and_run(cluster: Cluster) -> object:
        with joined() as place:
            return run(place)

    variables |= {"BACKEND": "nccl"}
    return started(
        join_and_run, [{**one, "LOCAL_RANK": one["RANK"]} for one in places([0, 1], 2, **variables)]
    )


def run_ahead(cluster: Cluster) -> None:
    """Launch operations that take 3 s in all, 50 ms each."""
    for _ in range(60):
        all_reduce(torch.ones(3, device="cuda"), async_op=True)
    torch.cuda.synchronize()


def test_an_operation_must_end_within_the_timeout_counted_from_its_launch(capfd):
    assert on_nccl(run_ahead, FAKE_SLOW=0.05) == [None, None]
    for error in on_nccl(run_ahead, FAKE_SLOW=0.05, OP_TIMEOUT=2):
        assert "was killed by SIGABRT" in str(error)
    assert "Watchdog caught collective operation timeout: all_reduce" in capfd.readouterr().err


def be_stuck_on_rank_1(cluster: Cluster) -> None:
    all_reduce(torch.ones(3, device="cuda"))
    if cluster.rank == 1:
        time.sleep(30)
    all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()


def test_a_stuck_rank_is_told_that_the_watchdog_of_the_other_has_ended_it(capfd):
    on_nccl(be_stuck_on_rank_1, OP_TIMEOUT=2)
    told = capfd.readouterr().err
    assert "Watchdog caught collective operation timeout: all_reduce of rank 0" in told
    assert "rank 1: rank 0 has died, so look for the first error in its log." in told


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
