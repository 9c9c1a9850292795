"""Asynchronous operations run in the order of their calls, and may be waited for in any order."""

import gc
import random
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from comm.transport.choice import use_transport
from comm.wire import work_queue
from comm.wire.work_queue import queue_of
from lab.ranks import run_ranks


def test_handles_may_be_waited_for_in_any_order():
    def many(cluster) -> None:
        n, r = cluster.world_size, cluster.rank
        tensors = [torch.full((50,), float(i * (r + 1))) for i in range(20)]
        handles = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
        work_queue = list(enumerate(handles))
        random.Random(r).shuffle(work_queue)  # another one on each rank
        for i, handle in work_queue:
            handle.wait()
            assert (tensors[i] == i * n * (n + 1) / 2).all()
            handle.wait()  # a second time does no harm

    run_ranks(many, 4)


def test_different_collectives_in_flight_do_not_disturb_each_other():
    def mixed(cluster) -> None:
        n, r = cluster.world_size, cluster.rank
        total, whole, shard = torch.tensor([r + 1.0]), torch.zeros(7), torch.zeros(2 if r == 0 else 1)
        news, exchanged = torch.tensor([r * 10.0]), torch.zeros(n)
        mine = torch.full((len(torch.tensor_split(whole, n)[r]),), float(r))
        handles = [
            collectives.all_reduce(total, async_op=True, pattern="tree"),
            collectives.all_gather(whole, mine, async_op=True),
            collectives.broadcast(news, root=2, async_op=True),
            collectives.reduce_scatter(shard, torch.arange(n + 1.0), async_op=True),
            collectives.all_to_all(exchanged, torch.arange(n) + 10.0 * r, async_op=True),
            collectives.barrier(async_op=True),
        ]
        for handle in reversed(handles):
            handle.wait()
        assert total.item() == n * (n + 1) / 2
        assert whole.tolist() == [0, 0, 1, 1, 2, 2, 3]
        assert news.item() == 20
        assert shard.tolist() == ([0.0, n] if r == 0 else [n * (r + 1.0)])
        assert exchanged.tolist() == [10.0 * p + r for p in range(n)]

    run_ranks(mixed, 4)


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


def test_groups_do_not_wait_for_each_other():
    def interleaved(cluster) -> None:
        n, r = cluster.world_size, cluster.rank
        groups = [dist.new_group(range(n)) for _ in range(3)]
        tensors = [torch.full((10,), float(g + 1)) for g in range(3)]
        work_queue = [0, 1, 2] if r % 2 else [2, 1, 0]  # in one group this would never end
        handles = {g: collectives.all_reduce(tensors[g], group=groups[g], async_op=True) for g in work_queue}
        for g in reversed(work_queue):
            handles[g].wait()
            assert (tensors[g] == n * (g + 1)).all()

    run_ranks(interleaved, 4)


@pytest.mark.parametrize("transport", ["auto", "sockets", "gloo"])
@pytest.mark.parametrize("pattern", ["pipelined_ring", "tree"])
def test_torchs_own_may_be_called_while_ours_is_in_flight(pattern: str, transport: str):
    def beside(cluster) -> None:
        use_transport(transport)
        for _ in range(3):
            ours, torchs = torch.ones(1000), torch.ones(10)
            handle = collectives.all_reduce(ours, async_op=True, pattern=pattern)
            time.sleep(0.01 * (cluster.rank == 2))  # on the others both begin at once
            collectives.all_reduce(torchs, pattern="torch")
            handle.wait()
            assert (ours == 3).all() and (torchs == 3).all()

    run_ranks(beside, 3, timeout=20)


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


@pytest.mark.parametrize("pattern", [None, "torch"])
def test_a_strided_result_is_complete_after_wait(pattern: str | None):
    def strided(cluster) -> None:
        n = cluster.world_size
        memory = torch.ones(4, 6)
        handle = collectives.all_reduce(memory.t()[::2], async_op=True, pattern=pattern)
        handle.wait()
        assert memory.tolist() == [[n, 1.0] * 3] * 4

    run_ranks(strided, 3)


def test_more_operations_than_there_are_tags_keep_apart():
    def around(cluster) -> None:
        collectives.barrier()
        queue_of(None).sequence = 1015  # tags begin again after 1023
        for i in range(20):
            x = torch.full((3,), float(i))
            collectives.all_reduce(x, async_op=i % 3 == 0).wait()
            assert (x == i * cluster.world_size).all()

    run_ranks(around, 3)


def test_a_finished_handle_does_not_keep_its_tensors_alive():
    def release(cluster) -> list[bool]:
        alive = []
        for async_op in (False, True):
            x = torch.ones(1000)
            handle = collectives.all_reduce(x, async_op=async_op)
            handle.wait()
            reference = weakref.ref(x)
            del x
            gc.collect()
            alive.append(reference() is not None)
        return alive

    assert run_ranks(release, 2) == [[False, False]] * 2


def test_a_group_without_references_is_freed():
    def make_and_forget(cluster) -> bool:
        group = dist.new_group([0, 1])
        collectives.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        reference = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return reference() is None

    assert run_ranks(make_and_forget, 2) == [True, True]


def test_the_communication_thread_of_an_idle_group_ends_and_a_new_one_takes_over():
    def threads() -> int:
        return sum(thread.name == "communication" for thread in threading.enumerate())

    def pause(cluster) -> None:
        work_queue.IDLE_SECONDS = 0.05
        for _ in range(2):
            x = torch.ones(3)
            collectives.all_reduce(x, async_op=True).wait()
            assert x.tolist() == [2.0] * 3
            deadline = time.monotonic() + 10
            while threads() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert threads() == 0

    run_ranks(pause, 2)
