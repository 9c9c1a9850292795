"""Let the ranks meet at the store: see which ranks are here or missing, and check that they fit together.

Each rank writes its name into the store, and waits until all names are there. A rank that finds an error
writes it into the store. Then all ranks that wait give up with the same sentence.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from lab.launch.threads import cores_id

_POLL = 0.01  # seconds between two checks of the store
_TELL = 2.0  # seconds between two lines about who is missing
_STUCK = "joined but did not go on; look for a process that is stuck or paused"
_LINGER = 1.0  # seconds for which a failed rank 0 keeps its store open, so that others can read the reason


def meet(store: dist.Store, rank: int, world_size: int, deadline: float, timeout: float, gpu: str) -> int:
    """Return the number of ranks that share this one's cores, when all ranks are here.

    Raise CommError, on all ranks the same, if a rank is missing at the deadline, if two processes
    claim one rank or one GPU, or if the world sizes differ.
    """
    me = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": world_size, "gpu": gpu}
    me["cores"] = cores_id()
    present = {rank: _claim(store, rank, me)}
    _say(rank, world_size, f"here as process {me['pid']} on {me['host']}")
    next_word = time.monotonic() + _TELL
    is_connected = False
    while (missing := [peer for peer in range(world_size) if peer not in present]) or not is_connected:
        try:
            is_connected = is_connected or liveness.connect(store, rank, world_size)
        except OSError as error:
            raise give_up(store, rank, f"Rank {rank} cannot connect to rank 0 ({error}).") from error
        raise_if_given_up(store, rank)
        present |= {p: json.loads(store.get(f"rank/{p}")) for p in missing if store.check([f"rank/{p}"])}
        now = time.monotonic()
        if missing and now > deadline:
            lonely = (
                f"{_ranks(missing)} of {world_size} did not join within {timeout:g} s; look into their logs, "
                "or start them with the same MASTER_ADDR and MASTER_PORT, or with a larger JOIN_TIMEOUT."
            )
            raise give_up(store, rank, lonely)
        if missing and now > next_word:
            _say(rank, world_size, f"still waiting for {_ranks(missing)}")
            next_word = now + _TELL
        time.sleep(_POLL)
    if refusal := _misfit(rank, present):
        raise give_up(store, rank, refusal)
    # Wait until all ranks have seen all names. If one fails before that, the others still learn the reason.
    wait_for_all(store, rank, world_size, "seen", deadline)
    if rank == 0:
        _say(rank, world_size, f"all {world_size} ranks have met")
    return [entry["cores"] for entry in present.values()].count(me["cores"])


def _claim(store: dist.Store, rank: int, me: dict[str, Any]) -> dict[str, Any]:
    """Write `me` to the store under this rank's key, and return it. CommError if another was there first."""
    entry = json.dumps(me)
    seated = store.compare_set(f"rank/{rank}", "", entry).decode()
    if seated != entry:
        other = json.loads(seated)
        raise give_up(
            store,
            rank,
            f"Two processes claim rank {rank}: process {other['pid']} on {other['host']} and process "
            f"{me['pid']} on {me['host']}; give each its own RANK.",
        )
    return me


def _misfit(rank: int, present: dict[int, dict[str, Any]]) -> str:
    """Return an error text if the world sizes differ or two ranks share a GPU, else ""."""
    first: dict[str, int] = {}
    world_size = present[rank]["world_size"]
    for peer, entry in sorted(present.items()):
        if entry["world_size"] != world_size:
            return (
                f"Rank {rank} was started with WORLD_SIZE {world_size}, but rank {peer} with "
                f"{entry['world_size']}; all ranks need the same."
            )
        gpu = entry["gpu"]
        if gpu and first.setdefault(gpu, peer) != peer:
            return (
                f"Ranks {first[gpu]} and {peer} share one GPU ({gpu}), and nccl needs one for each rank; "
                "start fewer ranks there, give each its own LOCAL_RANK, or let them share with BACKEND=gloo."
            )
    return ""


def wait_for_all(store: dist.Store, rank: int, world_size: int, stage: str, deadline: float) -> None:
    store.set(f"{stage}/{rank}", "")
    while missing := _absent(store, world_size, stage):
        raise_if_given_up(store, rank)
        if time.monotonic() > deadline:
            raise give_up(store, rank, f"The group cannot form: {_ranks(missing)} {_STUCK}.")
        time.sleep(_POLL)


def who_is_stuck(store: dist.Store, rank: int, world_size: int) -> str:
    """Return a clause that names the ranks that do not time out with the others: they are stuck."""
    store.set(f"timed out/{rank}", "")
    deadline = time.monotonic() + _LINGER
    while (missing := _absent(store, world_size, "timed out")) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return f"{_ranks(missing)} {_STUCK}" if missing else "not all ranks can reach each other"


def _absent(store: dist.Store, world_size: int, stage: str) -> list[int]:
    """Return the ranks that have not written their key of this stage, "{stage}/{rank}"."""
    keys = [f"{stage}/{peer}" for peer in range(world_size)]
    return [] if store.check(keys) else [r for r, key in enumerate(keys) if not store.check([key])]


def raise_if_given_up(store: dist.Store, rank: int) -> None:
    """Raise the error with which a rank has given up, or one that names the rank that has died."""
    gone = liveness.cause(0)  # before the check below: a rank writes its reason before it ends
    if store.check(["failed"]):
        raise give_up(store, rank, "")
    # If a rank has finished, it has met all others, and this rank will see that soon.
    if gone is not None and gone.how != "finished":
        raise give_up(store, rank, f"The group cannot form: {gone}.")


def give_up(store: dist.Store, rank: int, reason: str) -> CommError:
    """Write `reason` into the store unless it has one. Return the stored one as an error for all ranks."""
    with suppress(RuntimeError):
        reason = store.compare_set("failed", "", reason).decode()
        if rank == 0:
            liveness.fail(reason)
            liveness.wait_for_the_others(_LINGER)
    return CommError(reason)


def _ranks(ranks: list[int]) -> str:
    """Return the ranks as text: "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(rank: int, world_size: int, what: str) -> None:
    print(f"rank {rank} of {world_size}: {what}", file=sys.stderr, flush=True)
