"""Operations run in the order of their calls and may be waited for in any order; a barrier holds all back."""

import random

import pytest
import torch

from comm import collectives
from comm.collectives import CommError
from lab.ranks import run_ranks


def test_handles_may_be_waited_for_in_any_order():
    def many(cluster) -> None:
        n, r = cluster.world_size, cluster.rank
        tensors = [torch.full((50,), float(i * (r + 1))) for i in range(20)]
        handles = list(enumerate(collectives.all_reduce(tensor, async_op=True) for tensor in tensors))
        random.Random(r).shuffle(handles)  # another order on each rank
        for i, handle in handles:
            handle.wait()
            assert (tensors[i] == i * n * (n + 1) / 2).all()
            handle.wait()  # a second time does no harm

    run_ranks(many, 3)


def test_a_synchronous_operation_takes_its_turn_behind_the_asynchronous_ones():
    def turns(cluster) -> None:
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

    run_ranks(turns, 3)


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
def test_a_handle_is_completed_only_when_all_have_come(pattern: str | None):
    def hold_back(cluster) -> None:
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

    run_ranks(hold_back, 2)


@pytest.mark.parametrize("pattern", ["tree", "torch"])
def test_no_rank_leaves_a_barrier_before_all_have_arrived(pattern: str):
    def meet(cluster) -> None:
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

    run_ranks(meet, 3)
