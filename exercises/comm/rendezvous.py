"""A rendezvous at the store. Write `claim`, `note_arrivals` and `wait_for_all` of comm/membership/meeting.py.

Read notebooks/01_ranks.ipynb first. Do not open comm/membership/meeting.py yet: it contains the solution.

You may use:

    _absent(store: dist.Store, world_size: int, stage: str) -> list[int]
        Return the ranks that have not written their key of this stage, "{stage}/{rank}".
    _POLL = 0.05
    _ranks(ranks: list[int]) -> str
        Return the ranks as text: "rank 3" or "ranks 1, 2".
    _STUCK = 'joined but did not go on; look for a process that is stuck or paused'
    give_up(store: dist.Store, rank: int, reason: str) -> CommError
        Write `reason` into the store unless it has one.
    raise_if_given_up(store: dist.Store, rank: int) -> None
        Raise the error with which a rank has given up, or one that names the rank that has died.

Check it with `python -m exercises check rendezvous`.
"""

import json
import time
from typing import Any

import torch.distributed as dist

from comm.membership.meeting import _POLL, _STUCK, _absent, _ranks, give_up, raise_if_given_up


def claim(store: dist.Store, rank: int, me: dict[str, Any]) -> None:
    """Write `me` to the store under this rank's key. CommError if another process was there first.

    The store is a key-value server for all ranks. store.compare_set(key, "", text) writes the text if
    the key has no value, and returns, as bytes, the value that the key has then. The key is
    `rank/{rank}`, and the value is `me` as JSON, with "host" and "pid". If another process is there,
    raise give_up(store, rank, sentence), which tells the sentence to all other ranks, too: "Two
    processes claim rank {rank}: process {pid} on {host} and process {pid} on {host}; give each its
    own RANK."
    """
    raise NotImplementedError("`claim` is not written yet.")


def note_arrivals(store: dist.Store, rank: int, world_size: int, present: dict[int, dict[str, Any]]) -> None:
    """Add to `present` the entries of ranks that have come since the last call, by rank.

    store.check([key]) returns whether the key has a value, and store.get(key) returns the value.
    If an entry has another "world_size", give up with the sentence "Rank {rank} was started with
    WORLD_SIZE {world_size}, but rank {peer} with {its world size}; all ranks need the same."
    """
    raise NotImplementedError("`note_arrivals` is not written yet.")


def wait_for_all(store: dist.Store, rank: int, world_size: int, stage: str, deadline: float) -> None:
    """Return when all ranks have called this with the same `stage`.

    store.set(key, "") writes a key, `{stage}/{rank}`. `_absent` returns the ranks whose key is
    missing. Sleep `_POLL / 10` seconds between two looks, and call raise_if_given_up(store, rank)
    before each, because another rank may have found an error. After the deadline, a value of
    time.monotonic(), give up: "The group cannot form: {_ranks(missing)} {_STUCK}."
    """
    raise NotImplementedError("`wait_for_all` is not written yet.")
