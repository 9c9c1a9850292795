"""Ranks that have a store in common find each other there; threads with one store are the ranks here."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import meeting


def open_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    return store


def entry(pid: int, world_size: int = 3) -> dict:
    return {"host": "here", "pid": pid, "world_size": world_size, "gpu": ""}


def test_ranks_find_each_other_at_a_store():
    store = open_store()

    def meet(rank: int) -> dict[int, dict]:
        time.sleep(0.01 * rank)  # they come one after the other
        meeting.claim(store, rank, entry(10 + rank))
        present: dict[int, dict] = {}
        while len(present) < 3:
            meeting.note_arrivals(store, rank, 3, present)
        return present

    with ThreadPoolExecutor(3) as ranks:
        found = [future.result(timeout=3) for future in [ranks.submit(meet, rank) for rank in range(3)]]
    assert found == [{rank: entry(10 + rank) for rank in range(3)}] * 3


def test_only_one_of_two_processes_gets_a_rank():
    store = open_store()
    meeting.claim(store, 1, entry(7))
    sentence = "Two processes claim rank 1: process 7 on here and process 8 on here; give each its own RANK."
    with pytest.raises(CommError, match=re.escape(sentence)):
        meeting.claim(store, 1, entry(8))
    deadline = time.monotonic() + 3
    with pytest.raises(CommError, match=re.escape(sentence)):  # a rank that waits raises the same, at once
        meeting.wait_for_all(store, 2, 3, "seen", deadline)
    assert time.monotonic() < deadline, "a rank that waits must look for errors of others"


def test_a_rank_that_comes_with_another_world_size_is_refused():
    store, present = open_store(), {}
    meeting.claim(store, 1, entry(7))
    meeting.note_arrivals(store, 1, 3, present)
    assert present == {1: entry(7)}
    meeting.claim(store, 2, entry(8, world_size=4))
    expected = "Rank 1 was started with WORLD_SIZE 3, but rank 2 with 4; all ranks need the same."
    with pytest.raises(CommError, match=re.escape(expected)):
        meeting.note_arrivals(store, 1, 3, present)


def test_no_rank_goes_on_before_all_have_reached_a_stage():
    store, moments = open_store(), {}

    def go(rank: int) -> None:
        for stage in ("seen", "formed"):  # what is written for one stage must not count for the next
            time.sleep(0.05 * (rank == 2))
            moments[stage, rank, "before"] = time.monotonic()
            meeting.wait_for_all(store, rank, 3, stage, time.monotonic() + 10)
            moments[stage, rank, "after"] = time.monotonic()

    with ThreadPoolExecutor(3) as ranks:
        for future in [ranks.submit(go, rank) for rank in range(3)]:
            future.result(timeout=3)
    for stage in ("seen", "formed"):
        last = max(moments[stage, rank, "before"] for rank in range(3))
        assert all(moments[stage, rank, "after"] >= last for rank in range(3))


def test_ranks_that_do_not_reach_a_stage_are_named_at_the_deadline():
    expected = r"^The group cannot form: ranks 0, 2 joined but did not go on"
    with pytest.raises(CommError, match=expected):
        meeting.wait_for_all(open_store(), 1, 3, "seen", time.monotonic() + 0.05)
