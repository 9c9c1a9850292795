"""Keep ranks between the cells of a notebook: start, run cells on them, interrupt, stop.

      ranks = StandingRanks(4)                        warm in milliseconds (lab/ranks/forked.py)
      ranks.run("x = torch.ones(2) * rank")
      ranks.run("dist.all_reduce(x)\nx")              {0: Reply(shown="tensor([6., 6.])"), ...}
      ranks.stop()

An interrupt (Ctrl-C, a notebook's stop button) ends the cell on all ranks, also where a rank waits for a
message that does not come. Their variables stay. A rank that does not end its cell is killed, and all ranks
are started again.
"""

import itertools
import linecache
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import cloudpickle

from lab.launch.devices import num_gpus, refuse_devices
from lab.launch.errors import WorkbookError
from lab.ranks import stacks
from lab.ranks.cells import Reply, serve
from lab.ranks.child import INTERRUPT, READY, Job
from lab.ranks.forked import Processes
from lab.ranks.waiting import drawn
from lab.units import MAX_SECONDS

START_SECONDS = 30.0
STACK_SECONDS = 0.8  # for stuck ranks to write where they are, after an interrupt
INTERRUPT_SECONDS = 1.0  # for all ranks to end their cells after an interrupt
_STARTED_AGAIN = "All ranks have been started again, without their variables."
WAIT_AFTER_ERROR = 3.0  # seconds that ranks may take for a cell after another rank has failed in it


class StandingRanks:
    """Hold `world_size` ranks on this machine that form one group, with nccl if each has a GPU of its own."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size, self.device = world_size, device
        self._backend = "nccl" if device == "cuda" and num_gpus() >= world_size else "gloo"
        refuse_devices(device, self._backend, world_size)
        self._numbers = itertools.count(1)
        self._start()

    def run(
        self, source: str, ranks: Iterable[int] | None = None, name: str = "<cell>", record: bool = False
    ) -> dict[int, Reply]:
        """Run a cell, and return the reply of each rank. Raise WorkbookError after a death or Ctrl-C."""
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        return self._ask(("cell", source, name, record), ranks)

    def push(self, ranks: Iterable[int] | None = None, **values: Any) -> None:
        """Set variables on all ranks, or on some."""
        self._ask(("push", values), ranks)

    def pull(self, expression: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the value of a variable or expression on each rank. Raise WorkbookError if one has none."""
        replies = self._ask(("pull", expression), ranks)
        for rank, reply in replies.items():
            if reply.error:
                raise WorkbookError(f"rank {rank}: {reply.error}")
        return {rank: reply.value for rank, reply in replies.items()}

    def status(self) -> dict[int, tuple[int, str, int, list[str]]]:
        """Return each rank's process id, device, memory in bytes, and the names of its variables."""
        return {rank: reply.value for rank, reply in self._ask(("status",), None).items()}

    def stop(self) -> None:
        """End all ranks."""
        # First the folder: if this process is killed meanwhile, its ranks notice that and remove the rest.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes.end()

    def restart(self) -> None:
        """End all ranks and start new ones, without the variables of the old ones."""
        self.stop()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        work, place = cloudpickle.dumps((serve, (), {})), (list(sys.path), os.getcwd())
        given = self.world_size, self._folder, self._backend, self.device, MAX_SECONDS, work, *place
        self._processes = Processes([Job(rank, *given, stays=True) for rank in range(self.world_size)])
        missing = set(range(self.world_size))
        for rank, message in self._processes.messages(START_SECONDS):
            if message != READY:
                break
            missing.remove(rank)
            if not missing:
                return
        self.stop()
        raise WorkbookError(f"The ranks have not started: rank {min(missing)} has ended, or takes too long.")

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size) if ranks is None else ranks)
        for rank in chosen:
            if not 0 <= rank < self.world_size:
                raise WorkbookError(
                    f"There is no rank {rank}: there are {self.world_size}, from 0 on. %ranks N starts N."
                )
        return chosen

    def _ask(self, request: tuple[Any, ...], ranks: Iterable[int] | None) -> dict[int, Reply]:
        chosen = self._chosen(ranks)
        replies: dict[int, Reply] = {}
        self._send(cloudpickle.dumps(request), chosen)
        try:
            self._wait(chosen, replies, None)
        except KeyboardInterrupt:
            raise self._interrupt(chosen, replies, "The cell was interrupted") from None
        if len(replies) < len(chosen):
            failed = next(rank for rank, reply in replies.items() if reply.error)
            why = f"rank {failed} failed ({replies[failed].error}), and the other ranks still waited"
            raise self._interrupt(chosen, replies, why, replies[failed].traceback)
        return dict(sorted(replies.items()))

    def _send(self, message: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with suppress(OSError):  # a rank that has died: the wait for its reply says so
                self._processes.all[rank].pipe.send_bytes(message)

    def _wait(self, ranks: list[int], replies: dict[int, Reply], seconds: float | None) -> None:
        """Take the replies that come within `seconds`; after an error, within WAIT_AFTER_ERROR."""
        for rank, message in self._processes.messages(seconds):
            if message is None:
                how = self._processes.all[rank].death()
                self.restart()
                raise WorkbookError(f"rank {rank} {how}. {_STARTED_AGAIN}")
            replies[rank] = cloudpickle.loads(message)
            if len(replies) == len(ranks):
                return self._wait(ranks, replies, 0)  # show what was printed before the replies
            if replies[rank].error and seconds is None:
                return self._wait(ranks, replies, WAIT_AFTER_ERROR)

    def _interrupt(
        self, ranks: list[int], replies: dict[int, Reply], why: str, trace: str = ""
    ) -> WorkbookError:
        """End the cell on the ranks that still run it; return the error that says where each of them was."""
        waiting = [rank for rank in ranks if rank not in replies]
        asked = {rank: self._processes.all[rank] for rank in waiting}
        found, waits = stacks.ask(asked, self._folder, STACK_SECONDS)
        places = [f"rank {rank} was {place}" for rank, place in found.items()]
        if waits:
            places.append(drawn(waits))
        self._send(INTERRUPT, waiting)
        self._wait(ranks, replies, INTERRUPT_SECONDS)
        end = "The ranks keep their variables."
        if len(replies) < len(ranks) or not self._reform():
            self.restart()
            end = f"A rank did not end its cell. {_STARTED_AGAIN}"
        return WorkbookError("\n  ".join([f"{trace}{why}.", *places, end]))

    def _reform(self) -> bool:
        """Form the group again, whose connections may be closed. Return whether all ranks have done so."""
        ranks, replies = list(range(self.world_size)), dict[int, Reply]()
        self._send(cloudpickle.dumps(("reform", f"group {next(self._numbers)}")), ranks)
        self._wait(ranks, replies, INTERRUPT_SECONDS)
        return len(replies) == self.world_size and not any(reply.error for reply in replies.values())
