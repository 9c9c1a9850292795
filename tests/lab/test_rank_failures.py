"""A rank that fails, dies or hangs is named with its source line, and no rank is left alive."""

import os
import re
import signal
import threading
import time

import pytest
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
    assert error.value.rank == 1
    assert text.startswith("rank 1 failed:")
    assert 'raise ValueError("the cause")  # here it begins' in text and "test_rank_failures.py" in text
    assert "rank_child.py" not in text
    assert re.search(r"Afterwards also: .*rank 2 failed: KeyError: 'a consequence'", text)


def test_a_killed_rank_is_named_with_its_signal_and_so_is_one_that_exits():
    def killed(cluster) -> None:
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def leaves(cluster) -> None:
        if cluster.rank == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL before it returned") as error:
        run_ranks(killed, 3)
    assert error.value.rank == 1
    with pytest.raises(RankError, match="rank 1 exited with code 3 before it returned"):
        run_ranks(leaves, 3)


def test_failures_can_be_collected_instead():
    def work(cluster) -> str:
        if cluster.rank == 0:
            raise ValueError("only here")
        return "fine"

    first, *others = run_ranks(work, 3, collect_failures=True)
    assert isinstance(first, RankError) and first.rank == 0 and "only here" in str(first)
    assert others == ["fine", "fine"]


def test_a_result_that_cannot_be_sent_is_a_failure_of_that_rank():
    with pytest.raises(RankError, match=r"rank 0 failed:[\s\S]*cannot pickle"):
        run_ranks(lambda cluster: (number for number in range(3)), 1)


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
    text = str(error.value)
    assert text.startswith("no answer within 1.5 s.")
    assert re.search(r"rank 0 is stuck at \S+test_rank_failures\.py:\d+ in work: .*nobody else comes", text)
    assert re.search(r"\n +its other thread is at \S+test_rank_failures\.py:\d+ in .*in the background", text)
    assert re.search(r"rank 1 is stuck at \S+test_rank_failures\.py:\d+ in work: .*overslept", text)
    assert "rank 2 has finished" in text
    assert re.search(
        r"rank 3 is still computing at \S+test_rank_failures\.py:\d+ in work: (while True|pass)", text
    )
    assert not [path for path in tmp_path.iterdir() if is_alive(int(path.read_text()))]
