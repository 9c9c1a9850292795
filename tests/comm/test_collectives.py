"""Compare every collective, in every pattern, with one process that knows all ranks' inputs."""

import hashlib
import itertools
import random

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from comm.wire.streams import transports_of
from lab.ranks import run_ranks
from tests.comm.collective_cases import (
    ALL,
    ALL_REDUCE,
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
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_every_pattern_equals_the_reference_at_every_size(n: int):
    with short_segments(32):  # 101 elements are several segments to each rank
        assert min(run_ranks(run_cases, n, varied(ALL, n, (0, n - 1, n + 1, 101)))) > 80


@pytest.mark.parametrize(("transport", "n"), [("sockets", 3), ("tcp", 4), ("gloo", 4)])
def test_every_pattern_equals_the_reference_over_every_transport(transport: str, n: int):
    cases = varied(OURS, n, (0, n + 1, 101))
    with short_segments(32):
        assert min(run_ranks(lambda cluster: over(transport, cluster, run_cases, cases), n)) > 50


@on_ranks(3)
def test_messages_travel_as_the_transport_says(cluster):
    def kind(_) -> set[str]:
        collectives.all_reduce(torch.ones(1000))
        return transports_of("ring")

    kinds = [over(one, cluster, kind) for one in ("auto", "shared_memory", "sockets", "gloo")]
    assert kinds == [{"shared_memory"}, {"shared_memory"}, {"sockets"}, {"gloo"}]


@pytest.mark.parametrize(("transport", "numel"), [("auto", 1_000_000), ("sockets", 8_000_000)])
@on_ranks(2, timeout=10)
def test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_get_it(
    cluster, transport: str, numel: int
):
    """No buffer on the way holds such a message: the ring buffer has 1 MiB, and a socket some MB."""
    mine, got = torch.full((numel,), float(cluster.rank)), torch.empty(numel)
    over(transport, cluster, lambda _: collectives.all_to_all(got, mine))
    first, second = got.chunk(2)
    assert (first == 0).all() and (second == 1).all()


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


@on_ranks(3)
def test_tensors_of_any_shape_keep_it(cluster):
    scalar = torch.tensor(1.0)
    cube = torch.ones(2, 3, 4)[:, :, ::2]
    channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (scalar, cube, channels_last):
        collectives.all_reduce(tensor)
        assert bool((tensor == cluster.world_size).all())
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert [tuple(tensor.shape) for tensor in (scalar, cube)] == [(), (2, 3, 2)]


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


@on_ranks(2)
def test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would(cluster):
    large = torch.full((5,), 40000.0, dtype=torch.float16)
    for op, pattern in ALL:
        if op not in REDUCING:
            continue
        mine = large[: 4 + (pattern != "torch")]
        given, shard = mine.clone(), torch.tensor_split(mine, cluster.world_size)[cluster.rank].clone()
        if op == "reduce_scatter":
            collectives.reduce_scatter(shard, given, "mean", pattern=pattern)
        else:
            getattr(collectives, op)(given, "mean", pattern=pattern)
        for got in (given, shard):
            assert torch.equal(got, mine[: len(got)]), f"{op}, {pattern}: {got}"


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def test_an_all_reduce_is_bitwise_the_same_on_every_rank():
    n = 3

    def reduce_all(cluster) -> list[str]:
        results = []
        for pattern, dtype, op in itertools.product(
            ALL_REDUCE, (torch.float32, torch.bfloat16), ("sum", "mean", "product")
        ):
            inputs = [
                torch.randn(1003, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(n)
            ]
            mine = inputs[cluster.rank].clone()
            collectives.all_reduce(mine, op, pattern=pattern)
            if op != "product":
                expected = torch.stack(inputs).double().sum(0) / (n if op == "mean" else 1)
                tolerance = n * torch.finfo(dtype).eps * 10
                assert torch.allclose(mine.double(), expected, rtol=0, atol=tolerance), (pattern, dtype, op)
            results.append(f"{pattern} {dtype} {op} {bits(mine)}")
        signs = [0.0, -0.0, torch.nan, 1.0, -0.0]
        for pattern, op in itertools.product(ALL_REDUCE, REDUCTIONS):
            mine = torch.tensor([signs[(cluster.rank + i) % len(signs)] for i in range(20)])
            collectives.all_reduce(mine, op, pattern=pattern)
            assert pattern == "torch" or mine.isnan().any(), (pattern, op)
            mine[mine.isnan()] = 2.0
            results.append(f"{pattern} {op} with zeros of both signs and NaNs {bits(mine)}")
        return results

    first, *others = run_ranks(reduce_all, n)
    assert others == [first] * (n - 1)


@on_ranks(3)
def test_handles_may_be_waited_for_in_any_order(cluster):
    n, r = cluster.world_size, cluster.rank
    tensors = [torch.full((50,), float(i * (r + 1))) for i in range(20)]
    handles = list(enumerate(collectives.all_reduce(tensor, async_op=True) for tensor in tensors))
    random.Random(r).shuffle(handles)  # another order on each rank
    for i, handle in handles:
        handle.wait()
        assert (tensors[i] == i * n * (n + 1) / 2).all()
        handle.wait()  # a second time does no harm


@on_ranks(3)
def test_a_synchronous_operation_takes_its_turn_behind_the_asynchronous_ones(cluster):
    x = torch.tensor([1.0])
    for _ in range(20):
        # In this order alone 1 becomes (1 * 2 + 1) * 2 + ...; each works on what the last one left.
        x.fill_(1.0)
        first = collectives.all_reduce(x, async_op=True)
        collectives.broadcast(x, root=0)
        assert first.is_completed()
        second = collectives.all_reduce(x, "product", async_op=True)
        collectives.all_reduce(x)
        assert second.is_completed()
        assert x.item() == 3**3 * 3


def test_wait_raises_an_error_and_the_next_operation_works():
    def mismatch(cluster) -> str:
        good, after = torch.ones(3), torch.ones(4)
        before = collectives.all_reduce(good, async_op=True)
        bad = collectives.all_reduce(torch.ones(2 + cluster.rank), async_op=True)
        later = collectives.all_reduce(after, async_op=True)
        later.wait()
        before.wait()
        assert after.tolist() == [2.0] * 4 and good.tolist() == [2.0] * 3
        assert bad.is_completed()
        with pytest.raises(CommError) as first:
            bad.wait()
        with pytest.raises(CommError) as second:
            bad.wait()
        assert str(first.value) == str(second.value)
        return str(first.value)

    texts = run_ranks(mismatch, 2)
    assert texts[0] == texts[1]
    assert "rank 0: all_reduce(ring, sum) of 2 elements" in texts[0]


@pytest.mark.parametrize("pattern", [None, "torch"])
@on_ranks(2)
def test_a_handle_is_completed_only_when_all_have_come(cluster, pattern: str | None):
    x = torch.ones(5)
    if cluster.rank == 1:
        cluster.store.wait(["rank 0 has looked"])
    handle = collectives.all_reduce(x, async_op=True, pattern=pattern)
    if cluster.rank == 0:
        assert not handle.is_completed()
        cluster.store.set("rank 0 has looked", "")
    handle.wait()
    assert handle.is_completed()
    assert (x == 2).all()


@pytest.mark.parametrize("pattern", ["tree", "torch"])
@on_ranks(3)
def test_no_rank_leaves_a_barrier_before_all_have_arrived(cluster, pattern: str):
    for late in range(cluster.world_size):
        if cluster.rank == late:
            # a rank that slipped through would be here long before
            cluster.store.wait([f"{p} is at {late}" for p in range(cluster.world_size) if p != late])
            assert cluster.store.add(f"through {late}", 0) == 0
        else:
            cluster.store.set(f"{cluster.rank} is at {late}", "")
        cluster.store.add(f"came {late}", 1)
        collectives.barrier(pattern=pattern)
        assert cluster.store.add(f"came {late}", 0) == cluster.world_size
        cluster.store.add(f"through {late}", 1)
