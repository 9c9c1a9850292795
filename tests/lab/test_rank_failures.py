"""A rank that fails, dies or hangs is named with its source line, and no rank is left alive."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lab import ranks
from lab.ranks import RankError, run_ranks
from tests.lab.processes import is_alive


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
    assert 'raise ValueError("the cause")  # here it begins' in text and "test_rank_failures.py" in text
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
    text, place = str(error.value), r"at \S+test_rank_failures\.py:\d+ in"
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
    assert re.search(r'test_rank_failures\.py", line \d+ in work', capfd.readouterr().err)
