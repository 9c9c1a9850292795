"""A call that is wrong on its own rank is refused there, before anything is sent."""

import torch
import torch.distributed as dist

from comm import collectives
from lab.ranks import run_ranks
from tests.comm.helpers import error_text, works


def test_wrong_arguments_are_refused_before_anything_is_sent():
    ones, all_reduce = torch.ones, collectives.all_reduce
    wrong = {
        "all_reduce has no pattern 'zigzag'; choose one of auto, torch, ring, pipelined_ring, tree": lambda: (
            all_reduce(ones(2), pattern="zigzag")
        ),
        "broadcast: root 2 is not a rank of this group of 2": lambda: collectives.broadcast(ones(2), root=2),
        "no reduction 'average'; choose one of sum, mean": lambda: all_reduce(ones(2), "average"),
        "mean of torch.int64 tensors would be rounded": lambda: all_reduce(
            ones(2, dtype=torch.int64), "mean"
        ),
        "torch has no max of torch.complex64 tensors": lambda: all_reduce(
            ones(2, dtype=torch.complex64), "max"
        ),
        "torch has no sum of torch.uint16 tensors": lambda: all_reduce(ones(2, dtype=torch.uint16), "sum"),
        "tensors of one call must have one dtype, not torch.float32 and torch.float64": lambda: (
            collectives.all_gather(ones(2), ones(1, dtype=torch.float64))
        ),
        "input_sizes [1, 2] do not divide 2 elements into 2 parts": lambda: collectives.all_to_all(
            ones(2), ones(2), None, [1, 2]
        ),
        "pattern 'torch' needs equal shards, but 3 elements on 2 ranks": lambda: collectives.all_gather(
            ones(3), ones(1), pattern="torch"
        ),
    }

    def call(cluster) -> None:
        for expected, each in wrong.items():
            assert expected in error_text(each)
        rootless = error_text(lambda: collectives.scatter(ones(1), root=cluster.rank))
        assert rootless == f"scatter: rank {cluster.rank} is the root and must pass the full tensor.", (
            rootless
        )
        group = dist.new_group([0])
        refused = error_text(lambda: all_reduce(ones(1), group=group))
        assert refused == (
            "Rank 1 is not in this group; only its members may call this." if cluster.rank else ""
        )
        assert works()

    run_ranks(call, 2, group_timeout=10)


def test_compiled_code_that_communicates_ends_in_one_sentence():
    def call(cluster) -> str:
        compiled = torch.compile(lambda x: collectives.all_reduce(x * 2), backend="eager")
        return error_text(lambda: compiled(torch.ones(2)))

    [sentence] = run_ranks(call, 1, timeout=120)
    assert (
        sentence == "torch.compile cannot trace communication: compile only layers that do not communicate."
    )
