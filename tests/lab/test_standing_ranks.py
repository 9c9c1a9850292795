"""Ranks that stay keep their variables from cell to cell, and survive errors, deadlocks and Ctrl-C."""

import os
import signal
import threading
import time

import pytest
import torch

from lab.launch.errors import WorkbookError
from lab.notebook.standing_ranks import Interrupted, StandingRanks
from tests.lab.processes import is_alive

PROMPTLY = 2.0  # seconds within which an interrupt returns


@pytest.fixture(scope="module")
def ranks():
    standing = StandingRanks(3, lambda rank, line, stream: printed.append((rank, line)))
    yield standing
    standing.stop()


printed: list[tuple[int, str]] = []


def interrupt_soon(seconds: float = 0.3) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and their processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_variables_stay_and_the_last_expressions_value_is_returned(ranks):
    ranks.run("x = torch.ones(2) * rank")
    replies = ranks.run("dist.all_reduce(x)\nx")
    assert {rank: reply.shown for rank, reply in replies.items()} == dict.fromkeys(
        range(3), "tensor([3., 3.])"
    )
    assert ranks.run("x;")[0].shown is None
    assert ranks.run("y = 1")[0].shown is None
    assert ranks.run("_ + 1")[2].shown == "tensor([4., 4.])"


def test_a_cell_may_run_on_some_ranks_only(ranks):
    assert {rank: reply.shown for rank, reply in ranks.run("rank", [0, 2]).items()} == {0: "0", 2: "2"}
    with pytest.raises(WorkbookError, match="There is no rank 3: there are 3, from 0 on"):
        ranks.run("rank", [3])


def test_values_are_pushed_and_pulled(ranks):
    ranks.push(table={"a": torch.arange(3)})
    ranks.push([1], table=5)
    pulled = ranks.pull("table")
    assert pulled[1] == 5 and torch.equal(pulled[0]["a"], torch.arange(3))
    assert "table" in ranks.completed("")
    with pytest.raises(WorkbookError, match="rank 0: NameError: name 'nothing' is not defined"):
        ranks.pull("nothing")


def test_an_error_has_the_cells_lines_and_the_variables_stay(ranks):
    ranks.run("z = 7")
    replies = ranks.run("1 / (rank - 1)", name="<cell 12>")
    assert replies[0].shown == "-1.0"
    assert replies[1].error.startswith("ZeroDivisionError")
    assert 'File "<cell 12>", line 1' in replies[1].traceback and "1 / (rank - 1)" in replies[1].traceback
    assert "rank_cells" not in replies[1].traceback
    assert ranks.pull("z") == dict.fromkeys(range(3), 7)


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        (
            "t = torch.ones(2)\ndist.recv(t, (rank + 1) % 3)",
            "<cell>:2 in <module>: dist.recv(t, (rank + 1) % 3)",
        ),
        ("import time\nwhile True:\n    time.sleep(0.1)", "time.sleep(0.1)"),
        (
            "from comm.collectives import all_reduce\nif rank: all_reduce(torch.ones(3))\n"
            "else: dist.barrier()",
            "else: dist.barrier()",
        ),
    ],
    ids=["a deadlock in gloo", "a loop", "ranks in different operations"],
)
def test_an_interrupt_returns_says_where_each_rank_was_and_keeps_the_variables(ranks, cell, place):
    ranks.run("kept = rank * 10")
    before = ranks.pids
    interrupt_soon()
    start = time.monotonic()
    with pytest.raises(Interrupted) as error:
        ranks.run(cell)
    assert time.monotonic() - start < 0.3 + PROMPTLY
    text = str(error.value)
    assert text.startswith("The cell was interrupted.") and place in text
    assert all(f"rank {rank} was at " in text for rank in range(3))
    assert text.endswith("The ranks keep their variables.")
    assert ranks.pids == before
    assert ranks.pull("kept") == {0: 0, 1: 10, 2: 20}
    ranks.run("s = torch.tensor([1.0])\ndist.all_reduce(s)")
    assert ranks.pull("s.item()") == dict.fromkeys(range(3), 3.0)
    ranks.run("from comm.collectives import all_reduce\ns = torch.ones(5)\nall_reduce(s)")
    assert ranks.pull("s.sum().item()") == dict.fromkeys(range(3), 15.0)


def test_ranks_that_wait_for_one_that_failed_are_interrupted(ranks, monkeypatch):
    monkeypatch.setattr("lab.notebook.standing_ranks.WAIT_AFTER_ERROR", 0.2)
    with pytest.raises(Interrupted) as error:
        ranks.run("if rank == 1:\n    raise ValueError('the cause')\ndist.barrier()")
    assert "rank 1 failed (ValueError: the cause), and the other ranks still waited." in str(error.value)
    assert "raise ValueError('the cause')" in str(error.value)
    assert "rank 2 was at <cell>:3 in <module>: dist.barrier()" in str(error.value)
    assert ranks.run("rank")[1].shown == "1"


def test_a_rank_that_ends_is_named_and_all_are_started_again(ranks):
    ranks.run("lost = 1")
    before = ranks.pids
    with pytest.raises(
        WorkbookError, match=r"rank 2 was killed by SIGKILL\. All ranks have been started again"
    ):
        ranks.run("import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert not any(is_alive(pid) for pid in before)
    assert "lost" not in ranks.completed("")
    assert {reply.shown for reply in ranks.run("world_size").values()} == {"3"}
