"""Let the ranks meet at the store: see which ranks are here or missing, and check that they fit together.

Each rank writes its name into the store, and waits until all names are there. A rank that finds an error
writes it into the store. Then all ranks that wait give up with the same sentence.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from lab.launch.threads import cores_id

_POLL = 0.01  # seconds between two checks of the store
_TELL = 2.0  # seconds between two lines about who is missing
_STUCK = "joined but did not go on; look for a process that is stuck or paused"
_LINGER = 1.0  # seconds for which a failed rank 0 keeps its store open, so that others can read the reason


@dataclass
class Meeting:
    """One rank's view of the meeting. Its methods raise the same CommError on all ranks."""

    store: dist.Store
    rank: int
    world_size: int

    def meet(self, deadline: float, timeout: float, gpu: str) -> int:
        """Return the number of ranks that share this one's cores, when all ranks are here.

        Raise CommError if a rank is missing at the deadline, if two processes claim one rank or one GPU, or
        if the world sizes differ.
        """
        me = {"host": socket.gethostname(), "pid": os.getpid(), "cores": cores_id()}
        self._claim(me | {"world_size": self.world_size, "gpu": gpu})
        self._say(f"here as process {me['pid']} on {me['host']}")
        late = (
            f"{{}} of {self.world_size} did not join within {timeout:g} s; look into their logs, "
            "or start them with the same MASTER_ADDR and MASTER_PORT, or with a larger JOIN_TIMEOUT."
        )
        # Connect as soon as rank 0 is here, to notice a death while this rank waits for the others.
        self._wait_for([0], "rank", deadline, late)
        try:
            liveness.connect(self.store, self.rank, self.world_size)
        except OSError as error:
            raise self.give_up(f"Rank {self.rank} cannot connect to rank 0 ({error}).") from error
        self._wait_for(range(self.world_size), "rank", deadline, late)
        present = self._present()
        self._validate(present)
        # Wait until all have seen all names. If one fails before that, the others still learn the reason.
        self.wait_for_all("seen", deadline)
        if self.rank == 0:
            self._say(f"all {self.world_size} ranks have met")
        return [entry["cores"] for entry in present].count(me["cores"])

    def comes_back(self) -> int:
        """Return 0, or if the others train on without this rank, which had died, how many share its cores.

        Such a rank cannot form a group with them; they form one with it later (survivors.py).
        """
        if not self.store.check([f"lab/comes back/{self.rank}"]):
            return 0
        return [entry["cores"] for entry in self._present()].count(cores_id())

    def _present(self) -> list[dict[str, Any]]:
        return [json.loads(self.store.get(f"rank/{peer}")) for peer in range(self.world_size)]

    def wait_for_all(self, stage: str, deadline: float) -> None:
        """Note that this rank has reached a stage, and wait until all ranks have."""
        self.store.set(f"{stage}/{self.rank}", "")
        self._wait_for(range(self.world_size), stage, deadline, f"The group cannot form: {{}} {_STUCK}.")

    def who_is_stuck(self) -> str:
        """Return a clause that names the ranks that do not time out with the others: they are stuck."""
        self.store.set(f"timed out/{self.rank}", "")
        deadline = time.monotonic() + _LINGER
        while (missing := self._missing(range(self.world_size), "timed out")) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return f"{_ranks(missing)} {_STUCK}" if missing else "not all ranks can reach each other"

    def give_up(self, reason: str) -> CommError:
        """Write `reason` into the store unless it has one. Return the stored one as all ranks' error."""
        with suppress(RuntimeError):
            reason = self.store.compare_set("failed", "", reason).decode()
            if self.rank == 0:
                liveness.fail(reason)
                liveness.wait_for_the_others(_LINGER)
        return CommError(reason)

    def _claim(self, me: dict[str, Any]) -> None:
        entry = json.dumps(me)
        seated = self.store.compare_set(f"rank/{self.rank}", "", entry).decode()
        if seated != entry:
            other = json.loads(seated)
            raise self.give_up(
                f"Two processes claim rank {self.rank}: process {other['pid']} on {other['host']} and "
                f"process {me['pid']} on {me['host']}; give each its own RANK."
            )

    def _validate(self, present: list[dict[str, Any]]) -> None:
        first: dict[str, int] = {}
        for peer, entry in enumerate(present):
            if entry["world_size"] != self.world_size:
                raise self.give_up(
                    f"Rank {self.rank} was started with WORLD_SIZE {self.world_size}, but rank {peer} with "
                    f"{entry['world_size']}; all ranks need the same."
                )
            if bool(entry["gpu"]) != bool(present[0]["gpu"]):
                raise self.give_up(
                    f"Rank 0 and rank {peer} chose different backends, nccl and gloo: give all ranks one GPU "
                    "each, or the same BACKEND."
                )
            gpu = entry["gpu"]
            if gpu and first.setdefault(gpu, peer) != peer:
                raise self.give_up(
                    f"Ranks {first[gpu]} and {peer} share one GPU ({gpu}), and nccl needs one for each rank; "
                    "start fewer ranks there, give each its own LOCAL_RANK, or let them share with "
                    "BACKEND=gloo."
                )

    def _wait_for(self, peers: Sequence[int], stage: str, deadline: float, late: str) -> None:
        """Wait for the keys of `peers`. If some are missing at the deadline, give up: `late` says why."""
        next_word = time.monotonic() + _TELL
        while missing := self._missing(peers, stage):
            self._raise_if_given_up()
            if time.monotonic() > deadline:
                raise self.give_up(late.format(_ranks(missing)))
            if time.monotonic() > next_word:
                self._say(f"still waiting for {_ranks(missing)}")
                next_word += _TELL
            time.sleep(_POLL)

    def _missing(self, peers: Sequence[int], stage: str) -> list[int]:
        """Return the peers that have not written their key of this stage, "{stage}/{rank}"."""
        is_complete = self.store.check([f"{stage}/{peer}" for peer in peers])
        return [] if is_complete else [peer for peer in peers if not self.store.check([f"{stage}/{peer}"])]

    def _raise_if_given_up(self) -> None:
        """Raise the error with which a rank has given up, or one that names the rank that has died."""
        gone = liveness.cause(0)  # before the check below: a rank writes its reason before it ends
        if self.store.check(["failed"]):
            raise self.give_up("")
        # If a rank has finished, it has met all others, and this rank will see that soon.
        if gone is not None and gone.how != "finished":
            raise self.give_up(f"The group cannot form: {gone}.")

    def _say(self, what: str) -> None:
        print(f"rank {self.rank} of {self.world_size}: {what}", file=sys.stderr, flush=True)


def _ranks(ranks: list[int]) -> str:
    """Return the ranks as text: "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
