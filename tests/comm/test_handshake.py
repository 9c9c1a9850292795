"""Ranks whose calls do not fit together all raise the same error, and the group goes on working."""

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import PATTERNS
from lab.ranks import run_ranks
from tests.comm.mismatches import error_text, sentence_of_all, works


def test_another_size_is_a_mismatch_that_names_its_ranks():
    def call(rank: int) -> None:
        collectives.all_reduce(torch.ones(7 if rank == 1 else 5))

    assert sentence_of_all(3, call) == (
        "The ranks do not fit together: ranks 0, 2: all_reduce(ring, sum) of 5 elements of "
        "float32; rank 1: all_reduce(ring, sum) of 7 elements of float32. "
        "Every rank must pass tensors of the same size, and the same pattern, reduction and root."
    )


def test_another_operation_is_a_mismatch():
    def call(rank: int) -> None:
        if rank == 0:
            collectives.broadcast(torch.ones(5))
        else:
            collectives.all_reduce(torch.ones(5))

    text = sentence_of_all(4, call)
    assert "rank 0: broadcast(tree, root 0) of 5 elements" in text
    assert "ranks 1, 2, 3: all_reduce(ring, sum) of 5 elements" in text
    assert "Every rank must call the same collectives in the same order." in text


def test_another_root_pattern_or_reduction_is_a_mismatch():
    def other_root(rank: int) -> None:
        collectives.broadcast(torch.ones(5), root=int(rank == 2))

    def other_pattern(rank: int) -> None:
        collectives.all_reduce(torch.ones(5), pattern="tree" if rank == 0 else "flat")

    def other_reduction(rank: int) -> None:
        collectives.reduce(torch.ones(5), "mean" if rank == 1 else "sum")

    text = sentence_of_all(3, other_root)
    assert "ranks 0, 1: broadcast(tree, root 0)" in text and "rank 2: broadcast(tree, root 1)" in text
    text = sentence_of_all(3, other_pattern)
    assert "rank 0: all_reduce(tree, sum)" in text and "ranks 1, 2: all_reduce(flat, sum)" in text
    text = sentence_of_all(3, other_reduction)
    assert "ranks 0, 2: reduce(tree, sum, root 0)" in text and "rank 1: reduce(tree, mean, root 0)" in text


def test_every_pattern_refuses_another_size_and_another_dtype():
    def bring(cluster) -> list[str]:
        texts, odd = [], cluster.rank == 1

        def whole(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(numel, dtype=dtype)

        for op, patterns in PATTERNS.items():
            for pattern in patterns:
                for numel, dtype in (
                    (9 if odd else 6, torch.float32),
                    (6, [torch.float32, torch.int32][odd]),
                ):
                    full, shard, out = whole(numel, dtype), whole(2, dtype), whole(numel, dtype)
                    at_root = full if cluster.rank == 1 else None
                    calls = {
                        "broadcast": lambda: collectives.broadcast(full, pattern=pattern),
                        "scatter": lambda: collectives.scatter(shard, at_root, 1, pattern=pattern),
                        "gather": lambda: collectives.gather(shard, at_root, 1, pattern=pattern),
                        "reduce": lambda: collectives.reduce(full, pattern=pattern),
                        "all_gather": lambda: collectives.all_gather(full, shard, pattern=pattern),
                        "reduce_scatter": lambda: collectives.reduce_scatter(shard, full, pattern=pattern),
                        "all_reduce": lambda: collectives.all_reduce(full, pattern=pattern),
                        "all_to_all": lambda: collectives.all_to_all(out, full, pattern=pattern),
                    }
                    if op in calls:
                        texts.append(error_text(calls[op]))
                        assert works()
        return texts

    first, *others = run_ranks(bring, 3, group_timeout=10)
    assert all(first) and len(first) == 2 * sum(len(p) for op, p in PATTERNS.items() if op != "barrier")
    for other in others:
        assert other == first


def test_a_shard_of_the_wrong_size_is_named_with_its_rank():
    def too_large(rank: int) -> None:
        collectives.reduce_scatter(torch.ones(3 if rank == 2 else 2), torch.ones(6))

    def too_small(rank: int) -> None:
        collectives.all_gather(torch.ones(7), torch.ones(2))

    def scattered(rank: int) -> None:
        collectives.scatter(torch.ones(2), torch.ones(9) if rank == 1 else None, root=1)

    def gathered(rank: int) -> None:
        collectives.gather(torch.ones(4 - rank), torch.ones(6) if rank == 0 else None)

    assert "reduce_scatter: the shard of rank 2 has 3 elements, but its part of 6 on 3 ranks is 2" in (
        sentence_of_all(3, too_large)
    )
    assert "all_gather: the shard of rank 0 has 2 elements, but its part of 7 on 3 ranks is 3" in (
        sentence_of_all(3, too_small)
    )
    assert "scatter: the shard of rank 0 has 2 elements, but its part of 9 on 3 ranks is 3" in (
        sentence_of_all(3, scattered)
    )
    assert "gather: the shard of rank 0 has 4 elements" in sentence_of_all(3, gathered)


def test_an_all_to_all_with_sizes_that_do_not_fit_is_refused_on_all_ranks():
    def call(rank: int) -> None:
        sends = [1, 1, 3] if rank == 1 else [1, 1, 1]  # rank 2 expects one element of each
        collectives.all_to_all(torch.ones(3), torch.ones(sum(sends)), [1, 1, 1], sends)

    text = sentence_of_all(3, call)
    assert "all_to_all: rank 1 sends 3 elements to rank 2, which expects 1" in text


def test_operations_called_in_another_order_are_refused_and_none_is_left_over():
    def call(cluster) -> list[str]:
        def reduce() -> None:
            collectives.all_reduce(torch.ones(4))

        def broadcast() -> None:
            collectives.broadcast(torch.ones(4))

        calls = [reduce, broadcast] if cluster.rank else [broadcast, reduce]
        texts = [error_text(each) for each in calls]
        assert works()
        return texts

    first, *others = run_ranks(call, 3, group_timeout=10)
    assert all("in the same order" in text for text in first)
    assert others == [first, first]


def test_a_group_survives_a_mismatch_of_tensors_so_large_that_they_are_still_moving():
    def call(cluster) -> None:
        dtype = (torch.float32, torch.int32)[cluster.rank]
        for _ in range(4):
            group = dist.new_group([0, 1])
            full, shard = torch.zeros(1 << 23, dtype=dtype), torch.ones(1 << 22, dtype=dtype)
            assert "must pass tensors of the same dtype" in error_text(
                lambda: collectives.all_gather(full, shard, group=group)
            )
            for _ in range(3):
                x = torch.ones(1000)
                collectives.all_reduce(x, group=group)
                assert (x == 2).all()

    run_ranks(call, 2, group_timeout=10)
