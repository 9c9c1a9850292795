"""run_ranks returns results in rank order, tags output by rank, and leaves nothing open."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.ranks import run_ranks


def test_arguments_and_closures_travel_to_ranks_of_one_group_and_results_come_back_in_rank_order():
    factor = torch.tensor([2.0, 3.0])

    def work(cluster, base: int, table: dict) -> tuple:
        time.sleep(0.05 * (cluster.world_size - cluster.rank))  # the last rank is done first
        assert dist.get_backend() == "gloo" and dist.get_world_size() == cluster.world_size
        assert cluster.device == torch.device("cpu") and cluster.is_main == (cluster.rank == 0)
        cluster.store.set(f"hello from {cluster.rank}", "")
        cluster.store.wait([f"hello from {rank}" for rank in range(cluster.world_size)])
        total = torch.tensor(float(cluster.rank))
        dist.all_reduce(total)
        return cluster.rank, base + table["more"], total.item(), (factor * cluster.rank).tolist()

    results = run_ranks(work, 4, 10, {"more": 5})
    assert results == [(rank, 15, 6.0, [2.0 * rank, 3.0 * rank]) for rank in range(4)]


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_ranks(print, 0)


def test_output_is_tagged_by_rank_line_by_line(capfd):
    def work(cluster) -> None:
        print(f"one from {cluster.rank}\ntwo from {cluster.rank}")
        print("no end of line", end="", flush=True)
        print(f"an error from {cluster.rank}", file=sys.stderr)
        os.write(1, b" and past Python\n")

    run_ranks(work, 2)
    out, err = capfd.readouterr()
    for rank in (0, 1):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [
            f"[rank {rank}] one from {rank}",
            f"[rank {rank}] two from {rank}",
            f"[rank {rank}] no end of line and past Python",
        ]
        assert f"[rank {rank}] an error from {rank}\n" in err
    assert len(out.splitlines()) == 6


def test_a_large_result_and_many_calls_are_no_problem():
    results = run_ranks(lambda cluster: torch.full((1_000_000,), float(cluster.rank)), 2)
    assert [float(result.sum()) for result in results] == [0.0, 1e6]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for number in range(5):
        assert run_ranks(lambda cluster, n: n, 2, number) == [number] * 2
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2, "file descriptors are left open"


def test_a_rank_that_is_done_stays_until_its_peers_are():
    def work(cluster) -> float:
        x = torch.full((1000,), 7.0)
        if cluster.rank == 0:
            sys.modules["under_way"] = (dist.isend(x, 1), x)  # kept, not waited for
            return 0.0
        time.sleep(0.3)
        x.zero_()
        dist.recv(x, 0)
        return x[-1].item()

    assert run_ranks(work, 2, group_timeout=5) == [0.0, 7.0]


def test_a_rank_may_load_data_with_workers():
    def work(cluster: Cluster) -> list[float]:
        loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)
        return [batch.sum().item() for batch in loader]

    assert run_ranks(work, 1) == [[1.0, 5.0]]
