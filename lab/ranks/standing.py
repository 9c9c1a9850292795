"""Keep ranks between the cells of a notebook: start, run cells on them, interrupt, stop.

      ranks = StandingRanks(4, print_tagged)          warm in milliseconds (lab/ranks/forked.py)
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
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TextIO

import cloudpickle

from lab.launch.devices import num_gpus, refuse_devices
from lab.launch.errors import WorkbookError
from lab.ranks import forked, stacks
from lab.ranks.cells import Reply, Request, serve
from lab.ranks.child import Job
from lab.ranks.output import read_lines
from lab.ranks.waiting import drawn
from lab.units import MAX_SECONDS

START_SECONDS = 30.0
STACK_SECONDS = 0.8  # for stuck ranks to write where they are, after an interrupt
INTERRUPT_SECONDS = 1.0  # for all ranks to end their cells after an interrupt
_STARTED_AGAIN = "All ranks have been started again, without their variables."
WAIT_AFTER_ERROR = 3.0  # seconds that ranks may take for a cell after another rank has failed in it

Show = Callable[[int, str, TextIO], None]
"""A function that shows a line that a rank has printed: rank, line, and sys.stdout or sys.stderr."""


class StandingRanks:
    """Hold `world_size` ranks on this machine that form one group, with nccl if each has a GPU of its own."""

    def __init__(self, world_size: int, show: Show, device: str = "cpu") -> None:
        self.world_size, self.device = world_size, device
        self._backend = "nccl" if device == "cuda" and num_gpus() >= world_size else "gloo"
        refuse_devices(device, self._backend, world_size)
        self._show = show
        self._numbers = itertools.count(1)
        self._processes: list[forked.ForkedProcess] = []
        self._connections: dict[int, Connection] = {}
        self._selector: selectors.BaseSelector
        self._start()

    def run(
        self, source: str, ranks: Iterable[int] | None = None, name: str = "<cell>", record: bool = False
    ) -> dict[int, Reply]:
        """Run a cell, and return the reply of each rank. Raise WorkbookError after a death or Ctrl-C."""
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        return self._ask(Request("cell", source, name, record=record), self._chosen(ranks))

    def push(self, ranks: Iterable[int] | None = None, **values: Any) -> None:
        """Set variables on all ranks, or on some."""
        self._ask(Request("push", values=values), self._chosen(ranks))

    def pull(self, expression: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the value of a variable or expression on each rank. Raise WorkbookError if one has none."""
        replies = self._ask(Request("pull", expression), self._chosen(ranks))
        for rank, reply in replies.items():
            if reply.error:
                raise WorkbookError(f"rank {rank}: {reply.error}")
        return {rank: reply.value for rank, reply in replies.items()}

    def status(self) -> dict[int, tuple[int, str, int, list[str]]]:
        """Return each rank's process id, device, memory in bytes, and the names of its variables."""
        return {rank: reply.value for rank, reply in self._ask(Request("status"), self._chosen(None)).items()}

    def stop(self) -> None:
        """End all ranks."""
        # First the folder: if this process is killed meanwhile, its ranks notice that and remove the rest.
        shutil.rmtree(self._folder, ignore_errors=True)
        forked.end(self._processes)
        for connection in self._connections.values():
            connection.close()
        self._selector.close()
        self._processes = []

    def restart(self) -> None:
        """End all ranks and start new ones, without the variables of the old ones."""
        self.stop()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        address = os.path.join(self._folder, "cells")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        work = cloudpickle.dumps((serve, (address,), {}))
        place = (list(sys.path), os.getcwd())
        given = self.world_size, self._folder, self._backend, self.device, MAX_SECONDS, work, *place
        self._processes = forked.start([Job(rank, *given) for rank in range(self.world_size)])
        self._connections = {}
        self._selector = selectors.DefaultSelector()
        with listener:
            listener.settimeout(START_SECONDS)
            for _ in range(self.world_size):
                connection = Connection(listener.accept()[0].detach())
                self._connections[cloudpickle.loads(connection.recv_bytes())] = connection
        for rank, process in enumerate(self._processes):
            for end, what in ((self._connections[rank], "reply"), (process.out, "out"), (process.err, "err")):
                self._selector.register(end, selectors.EVENT_READ, (rank, what, bytearray()))

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size) if ranks is None else ranks)
        for rank in chosen:
            if not 0 <= rank < self.world_size:
                raise WorkbookError(
                    f"There is no rank {rank}: there are {self.world_size}, from 0 on. %ranks N starts N."
                )
        return chosen

    def _ask(self, request: Request, ranks: list[int]) -> dict[int, Reply]:
        message = cloudpickle.dumps(request)
        replies: dict[int, Reply] = {}
        for rank in ranks:
            try:
                self._connections[rank].send_bytes(message)
            except OSError:
                raise self._death(rank) from None
        try:
            self._wait(ranks, replies, None)
        except KeyboardInterrupt:
            raise self._interrupt(ranks, replies, "The cell was interrupted") from None
        if len(replies) < len(ranks):
            failed = next(rank for rank, reply in replies.items() if reply.error)
            why = f"rank {failed} failed ({replies[failed].error}), and the other ranks still waited"
            raise self._interrupt(ranks, replies, why, replies[failed].traceback)
        return dict(sorted(replies.items()))

    def _wait(self, ranks: list[int], replies: dict[int, Reply], deadline: float | None) -> None:
        while len(replies) < len(ranks):
            if deadline is None and any(reply.error for reply in replies.values()):
                deadline = time.monotonic() + WAIT_AFTER_ERROR
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._take(left, replies)
        while self._take(0.0, replies):  # what was printed before the replies
            pass

    def _take(self, seconds: float | None, replies: dict[int, Reply]) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            rank, what, buffer = key.data
            if what == "reply":
                try:
                    replies[rank] = cloudpickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    raise self._death(rank) from None
                continue
            lines, is_open = read_lines(key.fileobj, buffer)  # type: ignore[arg-type]
            if not is_open:
                self._selector.unregister(key.fileobj)
            for line in lines:
                self._show(rank, line, sys.stderr if what == "err" else sys.stdout)
        return bool(ready)

    def _death(self, rank: int) -> WorkbookError:
        how = self._processes[rank].death()
        self.restart()
        return WorkbookError(f"rank {rank} {how}. {_STARTED_AGAIN}")

    def _interrupt(
        self, ranks: list[int], replies: dict[int, Reply], why: str, trace: str = ""
    ) -> WorkbookError:
        """End the cell on the ranks that still run it; return the error that says where each of them was."""
        waiting = [rank for rank in ranks if rank not in replies]
        asked = {rank: self._processes[rank] for rank in waiting}
        found, waits = stacks.ask(asked, self._folder, STACK_SECONDS)
        places = [f"rank {rank} was {place}" for rank, place in found.items()]
        if waits:
            places.append(drawn(waits))
        message = cloudpickle.dumps(Request("interrupt"))
        for rank in waiting:
            with suppress(OSError):  # a rank that has died meanwhile: the wait below says so
                self._connections[rank].send_bytes(message)
        self._wait(ranks, replies, time.monotonic() + INTERRUPT_SECONDS)
        end = "The ranks keep their variables."
        if len(replies) < len(ranks) or not self._reform():
            self.restart()
            end = f"A rank did not end its cell. {_STARTED_AGAIN}"
        return WorkbookError("\n  ".join([f"{trace}{why}.", *places, end]))

    def _reform(self) -> bool:
        """Form the group again, whose connections may be closed. Return whether all ranks have done so."""
        request = cloudpickle.dumps(Request("reform", f"group {next(self._numbers)}"))
        replies: dict[int, Reply] = {}
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send_bytes(request)
        self._wait(list(self._connections), replies, time.monotonic() + INTERRUPT_SECONDS)
        return len(replies) == self.world_size and not any(reply.error for reply in replies.values())
