"""run_ranks returns results in rank order, tags output by rank, and works in a notebook."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lab.ranks import run_ranks


def test_results_come_in_rank_order_and_arguments_arrive():
    def work(cluster, base: int, table: dict) -> tuple:
        time.sleep(0.05 * (cluster.world_size - cluster.rank))  # the last rank is done first
        return cluster.rank, cluster.world_size, base + table["more"]

    assert run_ranks(work, 4, 10, {"more": 5}) == [(rank, 4, 15) for rank in range(4)]


def test_ranks_form_a_group_and_share_a_store():
    def work(cluster) -> float:
        assert dist.get_backend() == "gloo" and dist.get_world_size() == cluster.world_size
        assert cluster.device == torch.device("cpu") and cluster.is_main == (cluster.rank == 0)
        cluster.store.set(f"hello from {cluster.rank}", "")
        cluster.store.wait([f"hello from {rank}" for rank in range(cluster.world_size)])
        total = torch.tensor(float(cluster.rank))
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(work, 3) == [3.0] * 3


def test_closures_lambdas_and_tensors_travel_both_ways():
    factor = torch.tensor([2.0, 3.0])

    def scaled(cluster) -> torch.Tensor:
        return factor * cluster.rank

    got = run_ranks(scaled, 2)
    assert torch.equal(got[1], factor) and torch.equal(got[0], torch.zeros(2))
    assert run_ranks(lambda cluster: cluster.rank**2, 3) == [0, 1, 4]


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
    def work(cluster) -> torch.Tensor:
        return torch.full((1_000_000,), float(cluster.rank))

    assert [float(result.sum()) for result in run_ranks(work, 2)] == [0.0, 1e6]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for number in range(10):
        assert run_ranks(lambda cluster, n: n, 2, number) == [number] * 2
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2, "file descriptors are left open"


def test_a_rank_that_is_done_stays_until_its_peers_are():
    def work(cluster) -> float:
        x = torch.full((1000,), 7.0)
        if cluster.rank == 0:
            sys.modules["under_way"] = (dist.isend(x, 1), x)  # kept, not waited for
            return 0.0
        time.sleep(0.5)
        x.zero_()
        dist.recv(x, 0)
        return x[-1].item()

    assert run_ranks(work, 2, group_timeout=5) == [0.0, 7.0]
