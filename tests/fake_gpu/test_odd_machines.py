"""Test what a user of unusual machines, or of one that breaks, is told."""

import pytest

from tests.fake_gpu.ranks import SHORT, run_script, said_by_processes


def test_ranks_that_share_a_gpu_send_with_gloo_and_say_so(capfd: pytest.CaptureFixture[str]):
    figures = run_script("data_parallel/train_naive.py", *SHORT, BACKEND="", FAKE_GPUS="1")
    assert figures["replicas_equal"] is True
    assert "2 ranks share 1 GPU on this machine, so they send with gloo." in capfd.readouterr().err


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
def test_when_a_rank_is_killed_the_other_ends_with_a_sentence_that_names_it(script: str):
    """nccl's wait() does not raise: without the sentence the fake reports a deadlock after 25 seconds."""
    of_rank_0, _ = said_by_processes(script, *SHORT, FAKE_DIE="1@9")
    assert "rank 0: rank 1 has died, so look for the first error in its log." in of_rank_0
    assert "fake nccl:" not in of_rank_0
