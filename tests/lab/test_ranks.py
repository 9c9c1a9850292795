"""run_ranks returns results in rank order, tags output by rank, and leaves nothing open."""

import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from comm.collectives import all_reduce
from comm.point_to_point import recv, send
from lab import ranks
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from lab.ranks.waiting import Wait, chain
from tests.processes import is_alive


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


def test_the_traceback_of_the_rank_that_failed_first_has_its_source_line(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE", 10.0)  # until all have failed, however slow this machine is

    def work(cluster) -> None:
        if cluster.rank == 2:
            cluster.store.wait(["rank 1 fails"])
            time.sleep(0.1)
            raise KeyError("a consequence")
        if cluster.rank == 1:
            cluster.store.set("rank 1 fails", "")
            raise ValueError("the cause")  # here it begins
        dist.barrier()

    with pytest.raises(RankError) as error:
        run_ranks(work, 3)
    text = str(error.value)
    assert error.value.rank == 1 and text.startswith("rank 1 failed:")
    assert 'raise ValueError("the cause")  # here it begins' in text and "test_ranks.py" in text
    assert "ranks/child.py" not in text
    assert re.search(r"Afterwards also: .*rank 2 failed: KeyError: 'a consequence'", text)


@pytest.mark.parametrize("how, end", [("was killed by SIGKILL", None), ("exited with code 3", 3)])
def test_a_rank_that_dies_is_named_with_its_signal_or_exit_code(how, end):
    def work(cluster) -> None:
        if cluster.rank == 1:
            os._exit(end) if end else os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=f"rank 1 {how} before it returned") as error:
        run_ranks(work, 3)
    assert error.value.rank == 1


def die_if_first(path: str) -> None:
    if not os.path.exists(path) and os.open(path, os.O_CREAT | os.O_EXCL):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_before_the_group_is_formed_is_named_although_failures_are_collected(tmp_path):
    class DiesWhereItArrivesFirst:
        def __reduce__(self):
            return die_if_first, (str(tmp_path / "first"),)

    with pytest.raises(RankError, match=r"^rank \d was killed by SIGKILL before it returned"):
        run_ranks(lambda cluster, argument: None, 3, DiesWhereItArrivesFirst(), collect_failures=True)


def test_failures_can_be_collected_and_a_result_that_cannot_be_sent_is_one():
    def work(cluster):
        return (number for number in range(3)) if cluster.rank == 0 else "fine"

    first, *others = run_ranks(work, 3, collect_failures=True)
    assert isinstance(first, RankError) and first.rank == 0 and "cannot pickle" in str(first)
    assert others == ["fine", "fine"]


def test_a_hang_is_reported_with_the_line_where_each_rank_is_stuck_and_ends_them_all(monkeypatch, tmp_path):
    def work(cluster) -> None:
        (tmp_path / str(cluster.rank)).write_text(str(os.getpid()))
        if cluster.rank == 0:
            threading.Thread(target=lambda: time.sleep(60), daemon=True).start()  # in the background
            dist.barrier()  # nobody else comes
        elif cluster.rank == 1:
            time.sleep(60)  # overslept
        elif cluster.rank == 3:
            while True:  # busy
                pass

    monkeypatch.setattr(ranks, "_GRACE", 0.5)  # for a slow machine
    with pytest.raises(RankError) as error:
        run_ranks(work, 4, timeout=1.5)
    text, place = str(error.value), r"at \S+test_ranks\.py:\d+ in"
    assert text.startswith("no answer within 1.5 s.")
    assert re.search(rf"rank 0 is stuck {place} work: .*nobody else comes", text)
    assert re.search(rf"\n +its other thread is {place} .*in the background", text)
    assert re.search(rf"rank 1 is stuck {place} work: .*overslept", text)
    assert "rank 2 has finished" in text
    assert re.search(rf"rank 3 is still computing {place} work: (while True|pass)", text)
    assert not [path for path in tmp_path.iterdir() if is_alive(int(path.read_text()))]


def test_two_looks_find_a_cycle_of_ranks_that_wait_for_one_another():
    def work(cluster) -> None:
        dist.recv(torch.ones(1), 1 - cluster.rank)

    with pytest.raises(RankError) as error:
        run_ranks(work, 2, timeout=30, look_every=0.3)
    text = str(error.value)
    assert "a cycle, in which each rank waits for the next" in text and "within 30 s" not in text


def test_a_rank_that_holds_pythons_lock_prints_its_line(monkeypatch, capfd):
    def work(cluster) -> None:
        re.match("(a+)+$", "a" * 64 + "b")  # takes years, in C code that does not release the lock

    monkeypatch.setattr(ranks, "_STACKS", 1.0)
    with pytest.raises(RankError, match=r"rank 0 is stuck in C code, or too slow to answer"):
        run_ranks(work, 1, timeout=0.5)
    assert re.search(r'test_ranks\.py", line \d+ in work', capfd.readouterr().err)


@pytest.mark.parametrize(
    "peers, ranks", [({0: 1, 1: 0}, [0, 1]), ({0: 1, 1: 2, 2: 1}, [1, 2]), ({2: 0, 3: 2}, [3, 2]), ({}, [])]
)
def test_a_cycle_is_found_before_the_longest_chain(peers, ranks):
    assert chain({rank: Wait("receive from", peer) for rank, peer in peers.items()}) == ranks


def report_of(work, **options: float) -> str:
    with pytest.raises(RankError) as error:
        run_ranks(work, 2, **options)
    return str(error.value).splitlines()[-1].strip()


def test_two_ranks_that_send_first_are_drawn_as_a_cycle():
    def work(cluster) -> None:
        send(torch.ones(10), 1 - cluster.rank)
        recv(torch.ones(10), 1 - cluster.rank)

    first, second = "rank 0 waits to send 40 bytes to rank 1", "rank 1 waits to send 40 bytes to rank 0"
    cycle = "a cycle, in which each rank waits for the next: "
    assert report_of(work, timeout=60, look_every=0.3) == f"{cycle}{first} -> {second}"


def test_a_rank_that_never_comes_to_a_collective_is_named_with_what_the_other_waits_for():
    def calls_alone(cluster) -> None:
        if cluster.rank == 1:
            all_reduce(torch.ones(4), pattern="ring", async_op=True).wait()  # on a thread of its own

    waits = "rank 0 keeps the others waiting: rank 1 waits to receive a header from rank 0 in all_reduce"
    assert report_of(calls_alone, timeout=2) == waits
