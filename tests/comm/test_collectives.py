"""Compare every collective, in every pattern, with one process that knows all ranks' inputs."""

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.wire.streams import transports_of
from lab.ranks import run_ranks
from tests.comm.collective_cases import (
    ALL,
    DTYPES,
    OURS,
    REDUCING,
    REDUCTIONS,
    ROOTED,
    WORLD_SIZES,
    Case,
    run_case,
    run_cases,
    varied,
)
from tests.comm.helpers import over, short_segments


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_every_pattern_equals_the_reference_at_every_size(n: int):
    with short_segments(32):  # 101 elements are several segments to each rank
        assert min(run_ranks(run_cases, n, varied(ALL, n, (0, n - 1, n + 1, 101)))) > 80


@pytest.mark.parametrize(("transport", "n"), [("sockets", 3), ("tcp", 4), ("gloo", 4)])
def test_every_pattern_equals_the_reference_over_every_transport(transport: str, n: int):
    cases = varied(OURS, n, (0, n + 1, 101))
    with short_segments(32):
        assert min(run_ranks(lambda cluster: over(transport, cluster, run_cases, cases), n)) > 50


def test_messages_travel_as_the_transport_says():
    def kinds(cluster) -> list[set[str]]:
        def kind(_) -> set[str]:
            collectives.all_reduce(torch.ones(1000))
            return transports_of("ring")

        return [over(one, cluster, kind) for one in ("auto", "shared_memory", "sockets", "gloo")]

    expected = [{"shared_memory"}, {"shared_memory"}, {"sockets"}, {"gloo"}]
    assert run_ranks(kinds, 3) == [expected] * 3


@pytest.mark.parametrize(("transport", "numel"), [("auto", 1_000_000), ("sockets", 8_000_000)])
def test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_get_it(transport: str, numel: int):
    """No buffer on the way holds such a message: the ring buffer has 1 MiB, and a socket some MB."""

    def swap(cluster) -> None:
        mine, got = torch.full((numel,), float(cluster.rank)), torch.empty(numel)
        over(transport, cluster, lambda _: collectives.all_to_all(got, mine))
        first, second = got.chunk(2)
        assert (first == 0).all() and (second == 1).all()

    run_ranks(swap, 2, timeout=10)


@pytest.mark.parametrize("pattern", sorted({pattern for _, pattern in ALL}))
def test_every_reduction_is_right_in_every_dtype(pattern: str):
    """The ring does each reduction in each dtype. The others share its arithmetic."""
    each = [(dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]
    some = [*((dtype, "sum") for dtype in DTYPES), *((torch.float32, reduction) for reduction in REDUCTIONS)]
    cases = [
        Case(op, pattern, 7, dtype, reduction, root=1, seed=3)
        for op in REDUCING
        if (op, pattern) in ALL
        for dtype, reduction in (each if pattern in ("ring", "torch") else some)
    ]
    run_ranks(run_cases, 3, cases)


def test_tensors_of_any_shape_keep_it():
    def shapes(cluster) -> list[tuple]:
        scalar = torch.tensor(1.0)
        cube = torch.ones(2, 3, 4)[:, :, ::2]
        channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for tensor in (scalar, cube, channels_last):
            collectives.all_reduce(tensor)
            assert bool((tensor == cluster.world_size).all())
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
        return [tuple(tensor.shape) for tensor in (scalar, cube)]

    assert run_ranks(shapes, 3) == [[(), (2, 3, 2)]] * 3


def test_a_group_of_some_ranks_counts_its_own_ranks():
    cases = [
        Case(op, pattern, 6 + 5 * (pattern != "torch"), root=root, seed=root)
        for op, pattern in ALL
        for root in ((0, 1) if op in ROOTED else (0,))
    ]

    def in_groups(cluster) -> list[int]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for case in cases:
            run_case(case, pairs[cluster.rank % 2])
        # rank 1 is in all of these, as rank 1, 0 and 1
        overlapping = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
        results = []
        for group, members in zip(overlapping, ([0, 1], [1, 2], [0, 1, 2]), strict=True):
            if cluster.rank in members:
                mine = torch.tensor([10**cluster.rank])
                collectives.all_reduce(mine, group=group)
                from_last = torch.tensor([cluster.rank])
                collectives.broadcast(from_last, root=len(members) - 1, group=group)
                results += [int(mine), int(from_last)]
        return results

    assert run_ranks(in_groups, 4) == [[11, 1, 111, 2], [11, 1, 110, 2, 111, 2], [110, 2, 111, 2], []]
