"""Ranks whose calls do not fit together all raise the same error, and the group continues working."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import PATTERNS
from comm.wire.transport import use_transport
from lab.ranks import run_ranks
from tests.comm.helpers import error_text, works
from tests.comm.test_cost import call
from tests.on_ranks import on_ranks


def wrong_calls(rank: int) -> list[tuple[Callable[[], object], str]]:
    """Return calls that do not fit together on three ranks, and what all ranks say of each."""
    ones, sends = torch.ones, [1, 1, 3] if rank == 1 else [1, 1, 1]
    return [
        (
            lambda: collectives.all_reduce(ones(7 if rank == 1 else 5)),
            "The ranks do not fit together: ranks 0, 2: all_reduce(ring, sum) of 5 elements of float32; rank "
            "1: all_reduce(ring, sum) of 7 elements of float32. Every rank must pass tensors of the same "
            "size, and the same pattern, reduction and root.",
        ),
        (
            lambda: collectives.all_reduce(ones(5_000_000 + (rank == 1)), pattern="recursive_doubling"),
            "rank 1: all_reduce(recursive_doubling, sum) of 5000001 elements of float32",
        ),
        (
            lambda: collectives.all_reduce(ones(5, dtype=[torch.float32, torch.int32][rank == 2])),
            "Every rank must pass tensors of the same dtype.",
        ),
        (  # in another order: neither call is left over
            lambda: (collectives.all_reduce if rank else collectives.broadcast)(ones(5)),
            "rank 0: broadcast(tree, root 0) of 5 elements of float32; ranks 1, 2: all_reduce(ring, sum) of "
            "5 elements of float32. Every rank must call the same collectives in the same order.",
        ),
        (
            lambda: (collectives.broadcast if rank else collectives.all_reduce)(ones(5)),
            "Every rank must call the same collectives in the same order.",
        ),
        (lambda: collectives.broadcast(ones(5), root=int(rank == 2)), "rank 2: broadcast(tree, root 1)"),
        (
            lambda: collectives.all_reduce(ones(5), pattern="tree" if rank == 0 else "flat"),
            "rank 0: all_reduce(tree, sum) of 5 elements of float32; ranks 1, 2: all_reduce(flat, sum)",
        ),
        (
            lambda: collectives.reduce(ones(5), "mean" if rank == 1 else "sum"),
            "rank 1: reduce(tree, mean, root 0)",
        ),
        (
            lambda: collectives.reduce_scatter(ones(3 if rank == 2 else 2), ones(6)),
            "reduce_scatter: the shard of rank 2 has 3 elements, but its part of 6 on 3 ranks is 2",
        ),
        (
            lambda: collectives.all_gather(ones(7), ones(2)),
            "all_gather: the shard of rank 0 has 2 elements, but its part of 7 on 3 ranks is 3",
        ),
        (
            lambda: collectives.scatter(ones(2), ones(9) if rank == 1 else None, root=1),
            "scatter: the shard of rank 0 has 2 elements, but its part of 9 on 3 ranks is 3",
        ),
        (
            lambda: collectives.gather(ones(4 - rank), ones(6) if rank == 0 else None),
            "gather: the shard of rank 0 has 4 elements",
        ),
        (
            lambda: collectives.all_to_all(ones(3), ones(sum(sends)), [1, 1, 1], sends),
            "all_to_all: rank 1 sends 3 elements to rank 2, which expects 1",
        ),
        (  # rank 2 does not see that the parts of the others differ
            lambda: collectives.all_to_all(
                ones(4 if rank == 1 else 3),
                ones(4 if rank == 0 else 3),
                [2, 1, 1] if rank == 1 else [1, 1, 1],
                [1, 2, 1] if rank == 0 else [1, 1, 1],
                pattern="bruck",
            ),
            "all_to_all: in the pattern bruck all parts of all ranks must have the same size; take pairwise.",
        ),
    ]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_calls_that_do_not_fit_end_in_the_same_sentence_on_all_ranks(transport: str):
    def differ(cluster) -> list[str]:
        use_transport(transport)
        texts = []
        for each, expected in wrong_calls(cluster.rank):
            texts.append(error_text(each))
            assert expected in texts[-1]
            assert works(), f"the group does not work after: {expected}"
        return texts

    first, *others = run_ranks(differ, 3, group_timeout=20)
    assert others == [first] * 2


def test_every_pattern_refuses_another_size_and_another_dtype():
    def bring(cluster) -> list[str]:
        texts, odd = [], cluster.rank == 1
        for op, patterns in PATTERNS.items():
            for pattern in patterns if op != "barrier" else ():
                for numel, dtype in (
                    (9 if odd else 6, torch.float32),
                    (6, torch.int32 if odd else torch.float32),
                ):
                    texts.append(error_text(lambda: call(op, pattern, numel, dtype, 3, cluster.rank, root=1)))
                    assert works()
        return texts

    first, *others = run_ranks(bring, 3, group_timeout=10)
    assert all(first) and others == [first, first]
    assert len(first) == 2 * sum(len(patterns) for op, patterns in PATTERNS.items() if op != "barrier")


@on_ranks(2, group_timeout=10)
def test_wrong_arguments_are_refused_before_anything_is_sent(cluster):
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
    for expected, each in wrong.items():
        assert expected in error_text(each)
    rootless = error_text(lambda: collectives.scatter(ones(1), root=cluster.rank))
    assert rootless == f"scatter: rank {cluster.rank} is the root and must pass the full tensor.", rootless
    group = dist.new_group([0])
    refused = error_text(lambda: all_reduce(ones(1), group=group))
    assert refused == ("Rank 1 is not in this group; only its members may call this." if cluster.rank else "")
    assert works()


def test_compiled_code_that_communicates_ends_in_one_sentence():
    def call(cluster) -> str:
        compiled = torch.compile(lambda x: collectives.all_reduce(x * 2), backend="eager")
        return error_text(lambda: compiled(torch.ones(2)))

    [sentence] = run_ranks(call, 1, timeout=120)
    assert (
        sentence == "torch.compile cannot trace communication: compile only layers that do not communicate."
    )
