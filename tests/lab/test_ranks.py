"""run_ranks returns results in rank order, tags output by rank, and works in a notebook."""

import os
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

from lab.ranks import RankError, run_ranks


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


def test_ranks_may_start_without_a_group():
    def work(cluster) -> bool:
        return dist.is_initialized()

    assert run_ranks(work, 2, backend=None) == [False, False]


def test_a_rank_uses_one_thread_for_its_arithmetic():
    assert run_ranks(lambda cluster: torch.get_num_threads(), 2) == [1, 1]


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_ranks(print, 0)


def test_timeouts_that_no_clock_can_count_are_refused():
    for seconds in (0, -1.0, float("inf"), float("nan"), 1e300):
        for name in ("timeout", "group_timeout"):
            with pytest.raises(ValueError, match=rf"^{name} must be a number of seconds above 0 and at most"):
                run_ranks(print, 1, **{name: seconds})


def test_tags_have_no_colour_in_a_file_also_after_a_program_has_imported_ipykernel(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    run_ranks(lambda cluster: print("here"), 1)
    assert capfd.readouterr().out == "[rank 0] here\n"


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


def test_everything_a_failing_rank_has_printed_is_shown(capfd):
    def work(cluster) -> None:
        for number in range(2000):
            print(number)
        print("last words", end="")
        raise ValueError

    with pytest.raises(RankError):
        run_ranks(work, 1)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[rank 0] {number}" for number in range(2000)] + ["[rank 0] last words"]


def test_a_large_result_and_many_calls_are_no_problem():
    def work(cluster) -> torch.Tensor:
        return torch.full((1_000_000,), float(cluster.rank))

    assert [float(result.sum()) for result in run_ranks(work, 2)] == [0.0, 1e6]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for number in range(10):
        assert run_ranks(lambda cluster, n: n, 2, number) == [number] * 2
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2, "file descriptors are left open"


def test_four_ranks_start_warm(capsys):
    run_ranks(lambda cluster: None, 1)
    start = time.perf_counter()
    run_ranks(lambda cluster: None, 4)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f" [4 warm ranks in {seconds:.2f} s] ", end="")
    assert seconds < 5  # a start that imports torch again in every rank takes longer


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
