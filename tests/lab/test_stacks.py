"""A rank that is stuck says where it is, by a thread or, if that cannot run, by a signal handler."""

import re
import threading

import pytest

from lab import ranks
from lab.ranks import RankError, run_ranks, stacks


def test_stacks_are_awaited_until_the_main_threads_is_complete(tmp_path):
    file = tmp_path / "stack-0"
    file.write_text('Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n')

    def write_the_rest() -> None:
        with file.open("a") as rest:
            rest.write('\nCurrent thread 0x2 (most recent call first):\n  File "b.py", line 2 in <module>\n')

    threading.Timer(0.2, write_the_rest).start()
    stacks._await([str(file)], 20.0)
    assert stacks.where(str(file)).startswith("at b.py:2 in <module>")


def test_a_rank_that_holds_pythons_lock_is_found_by_the_signal(monkeypatch):
    def work(cluster) -> None:
        re.match("(a+)+$", "a" * 64 + "b")  # takes years, in C code that does not release the lock

    monkeypatch.setattr(ranks, "_STACKS", 2.0)
    with pytest.raises(RankError, match=r"rank 0 is stuck at \S+test_stacks\.py:\d+ in work: re\.match"):
        run_ranks(work, 1, timeout=0.5)
