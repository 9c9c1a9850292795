"""A call that is wrong on its own rank is refused there, before anything is sent."""

import torch
import torch.distributed as dist

from comm import collectives
from lab.ranks import run_ranks
from tests.comm.mismatches import error_text, works


def test_wrong_arguments_are_refused_before_anything_is_sent():
    wrong = {
        "all_reduce has no pattern 'zigzag'; choose one of auto, torch, ring, pipelined_ring, tree": lambda: (
            collectives.all_reduce(torch.ones(2), pattern="zigzag")
        ),
        "broadcast: root 2 is not a rank of this group of 2": lambda: collectives.broadcast(
            torch.ones(2), root=2
        ),
        "no reduction 'average'; choose one of sum, mean": lambda: collectives.all_reduce(
            torch.ones(2), "average"
        ),
        "mean of torch.int64 tensors would be rounded": lambda: collectives.all_reduce(
            torch.ones(2, dtype=torch.int64), "mean"
        ),
        "tensors of one call must have one dtype, not torch.float32 and torch.float64": lambda: (
            collectives.all_gather(torch.ones(2), torch.ones(1, dtype=torch.float64))
        ),
        "input_sizes [1, 2] do not divide 2 elements into 2 parts": lambda: collectives.all_to_all(
            torch.ones(2), torch.ones(2), None, [1, 2]
        ),
        "pattern 'torch' needs equal shards, but 3 elements on 2 ranks": lambda: collectives.all_gather(
            torch.ones(3), torch.ones(1), pattern="torch"
        ),
    }

    def call(cluster) -> dict[str, str]:
        texts = {expected: error_text(each) for expected, each in wrong.items()}
        assert works()
        return texts

    for texts in run_ranks(call, 2, group_timeout=10):
        for expected, text in texts.items():
            assert expected in text


def test_a_reduction_that_a_dtype_does_not_have_is_refused_and_the_group_stays_usable():
    def call(cluster) -> list[str]:
        texts = [
            error_text(lambda: collectives.all_reduce(torch.ones(2, dtype=dtype), op))
            for dtype, op in ((torch.complex64, "max"), (torch.uint16, "sum"))
        ]
        assert works()
        return texts

    for texts in run_ranks(call, 3, group_timeout=5):
        assert all(texts)


def test_a_root_without_its_tensor_gets_an_error_that_says_what_to_pass():
    def call(cluster) -> str:
        return error_text(lambda: collectives.scatter(torch.ones(1)))

    assert run_ranks(call, 1) == ["scatter: rank 0 is the root and must pass the full tensor."]


def test_a_rank_outside_the_group_gets_an_error():
    def call(cluster) -> str:
        group = dist.new_group([0])
        return error_text(lambda: collectives.all_reduce(torch.ones(1), group=group))

    member, outsider = run_ranks(call, 2)
    assert member == ""
    assert "not" in outsider and "group" in outsider
