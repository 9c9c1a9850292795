"""Run a notebook's cells in a rank that stays: its variables live from one cell to the next.

      notebook's process                     rank
      request  ────────────────────►  thread (child.py) ─► queue ─► main thread runs the cell
      Reply    ◄───────────────────────────────────────────────────── and answers

A request names a method of _Cells, with its arguments. A rank that waits in gloo's C++ code does not notice
Ctrl-C. So an interrupt shuts down the TCP connections of this process, and what waits for a message raises an
error.
"""

import ast
import linecache
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.launch.interface import shut_down_connections
from lab.ranks.child import Parent, form_group, trace_of
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.memory import resident_bytes
from lab.units import MAX_SECONDS

PATIENCE = 0.3  # seconds for which Python code may react to the interrupt, before connections are closed


@dataclass(frozen=True)
class Reply:
    """A rank's answer: a value, or the error that ended the request."""

    value: Any = None
    shown: str | None = None  # repr of the cell's last expression; None if it is None
    error: str = ""  # the last line of the traceback
    traceback: str = ""
    events: tuple[Event, ...] = ()  # of a cell that was recorded


def serve(cluster: Cluster, parent: Parent) -> None:
    """Answer the parent's requests, until it ends."""
    _Cells(cluster, parent).run()


class _Cells:
    """Holds the variables of one rank's cells, and runs one request after the other."""

    def __init__(self, cluster: Cluster, parent: Parent) -> None:
        self._cluster, self._parent = cluster, parent
        self._backend = dist.get_backend()
        self._is_busy = False
        self._done = threading.Event()
        self.names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "dist": dist}
        self.names |= {"cluster": cluster, "rank": cluster.rank}
        self.names |= {"world_size": cluster.world_size, "device": cluster.device}
        self._given = set(self.names)

    def run(self) -> None:
        """Run requests in the main thread. The parent's thread ends this process with the parent."""
        signal.signal(signal.SIGINT, self._interrupted)
        self._parent.interrupt = self._interrupt
        while True:
            request = self._parent.requests.get()
            self._done.clear()
            try:
                self._is_busy = True
                method, *arguments = cloudpickle.loads(request)
                value = getattr(self, method)(*arguments)
                reply = value if isinstance(value, Reply) else Reply(value)
                self._is_busy = False
            except BaseException as error:
                self._is_busy = False
                trace = trace_of(error, __file__)
                last = "".join(trace.format_exception_only()).strip().splitlines()[-1]
                reply = Reply(error=last, traceback="".join(trace.format()))
            self._done.set()
            try:
                message = cloudpickle.dumps(reply)
            except Exception as error:
                message = cloudpickle.dumps(Reply(error=f"The value cannot be sent: {error}"))
            self._parent.pipe.send_bytes(message)

    def _interrupted(self, *_: object) -> None:
        if self._is_busy:
            raise KeyboardInterrupt

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if not self._done.wait(PATIENCE):
            shut_down_connections()

    def cell(self, source: str, name: str, record: bool) -> Reply:
        """Run a cell, called `name` in tracebacks; return its last value, and its spans if it is recorded."""
        if not record:
            return Reply(shown=self._execute(source, name))
        timeline.start_recording()
        shown = self._execute(source, name)
        timeline.stop_recording()
        events = (event._replace(rank=self._cluster.rank) for event in timeline.recorded())
        return Reply(shown=shown, events=tuple(events))

    def _execute(self, source: str, name: str) -> str | None:
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), self.names)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
        if value is None or source.rstrip().endswith(";"):
            return None
        self.names["_"] = value
        return repr(value)

    def pull(self, expression: str) -> Any:
        """Return the value of an expression."""
        return eval(expression, self.names)

    def push(self, values: dict[str, Any]) -> None:
        """Set variables."""
        self.names.update(values)

    def status(self) -> tuple[int, str, int, list[str]]:
        """Return the process id, the device, the memory in bytes, and the names of the cells' variables."""
        device = self._cluster.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
        own = sorted(set(self.names) - self._given - {"_", "__builtins__"})
        return os.getpid(), str(device), held, own

    def reform(self, prefix: str) -> None:
        """Form the group again after an interrupt. Groups that cells have made are gone."""
        store = dist.PrefixStore(prefix, self._cluster.store)
        with suppress(Exception):
            dist.destroy_process_group()
        form_group(self._backend, store, self._cluster.rank, self._cluster.world_size, MAX_SECONDS)
