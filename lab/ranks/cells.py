"""Run a notebook's cells in a rank that stays: its variables live from one cell to the next.

      notebook's process                     rank
      Request  ──── Unix socket ────►  reader thread ─► queue ─► main thread runs the cell
      Reply    ◄───────────────────────────────────────────────── and answers

A rank that waits in gloo's C++ code does not notice Ctrl-C. So the reader thread can interrupt the main
thread: it shuts down the TCP connections of this process, and what waits for a message raises an error.
"""

import ast
import linecache
import os
import queue
import signal
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.launch.interface import shut_down_connections
from lab.ranks.child import form_group
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.memory import resident_bytes
from lab.units import MAX_SECONDS

PATIENCE = 0.3  # seconds for which Python code may react to the interrupt, before connections are closed


@dataclass(frozen=True)
class Request:
    """Asks for `kind`: a "cell", "push", "pull", "status", "reform" or "interrupt"."""

    kind: str
    text: str = ""  # a cell's source, an expression, or the prefix of a new group's store
    name: str = ""  # the cell's file name in tracebacks
    values: dict[str, Any] = field(default_factory=dict)  # to push
    record: bool = False  # whether to record the cell's spans (lab/trace/timeline.py)


@dataclass(frozen=True)
class Reply:
    """A rank's answer: a value, or the error that ended the request."""

    value: Any = None
    shown: str | None = None  # repr of the cell's last expression; None if it is None
    error: str = ""  # the last line of the traceback
    traceback: str = ""
    events: tuple[Event, ...] = ()  # of a cell that was recorded


def serve(cluster: Cluster, address: str) -> None:
    """Answer the requests that come over the Unix socket at `address`, until it is closed."""
    connection = Client(address, "AF_UNIX")
    connection.send_bytes(cloudpickle.dumps(cluster.rank))
    _Cells(cluster, connection).run()


class _Cells:
    """Holds the variables of one rank's cells, and runs one request after the other."""

    def __init__(self, cluster: Cluster, connection: Connection) -> None:
        self._cluster, self._connection = cluster, connection
        self._backend = dist.get_backend()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._is_busy = False
        self._done = threading.Event()
        self.names: dict[str, Any] = {
            "__name__": "__main__",
            "torch": torch,
            "dist": dist,
            "cluster": cluster,
        }
        self.names |= {"rank": cluster.rank, "world_size": cluster.world_size, "device": cluster.device}
        self._given = set(self.names)

    def run(self) -> None:
        """Run requests in the main thread until the connection ends."""
        signal.signal(signal.SIGINT, self._interrupted)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while (request := self._requests.get()) is not None:
            self._done.clear()
            try:
                self._is_busy = True
                reply = getattr(self, request.kind)(request)
                self._is_busy = False
            except BaseException as error:
                self._is_busy = False
                reply = _failure(error)
            self._done.set()
            self._answer(reply)

    def _interrupted(self, *_: object) -> None:
        if self._is_busy:
            raise KeyboardInterrupt

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                request: Request = cloudpickle.loads(self._connection.recv_bytes())
                if request.kind == "interrupt":
                    threading.Thread(target=self._interrupt, daemon=True).start()
                else:
                    self._requests.put(request)
        self._requests.put(None)

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if not self._done.wait(PATIENCE):
            shut_down_connections()

    def _answer(self, reply: Reply) -> None:
        try:
            message = cloudpickle.dumps(reply)
        except Exception as error:
            message = cloudpickle.dumps(Reply(error=f"The value cannot be sent: {error}"))
        self._connection.send_bytes(message)

    def cell(self, request: Request) -> Reply:
        """Run a cell, and return the value of its last expression, and its spans if they are recorded."""
        if not request.record:
            return self._execute(request)
        timeline.start_recording()
        reply = self._execute(request)
        timeline.stop_recording()
        events = tuple(event._replace(rank=self._cluster.rank) for event in timeline.recorded())
        return replace(reply, events=events)

    def _execute(self, request: Request) -> Reply:
        lines = request.text.splitlines(keepends=True)
        linecache.cache[request.name] = len(request.text), None, lines, request.name
        tree = ast.parse(request.text, request.name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, request.name, "exec"), self.names)
        if not isinstance(last, ast.Expr):
            return Reply()
        value = eval(compile(ast.Expression(last.value), request.name, "eval"), self.names)
        if value is None or request.text.rstrip().endswith(";"):
            return Reply()
        self.names["_"] = value
        return Reply(shown=repr(value))

    def pull(self, request: Request) -> Reply:
        """Return the value of an expression."""
        return Reply(eval(request.text, self.names))

    def status(self, request: Request) -> Reply:
        """Return the process id, the device, the memory in bytes, and the names of the cells' variables."""
        device = self._cluster.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
        own = sorted(set(self.names) - self._given - {"_", "__builtins__"})
        return Reply((os.getpid(), str(device), held, own))

    def push(self, request: Request) -> Reply:
        """Set variables."""
        self.names.update(request.values)
        return Reply()

    def reform(self, request: Request) -> Reply:
        """Form the group again after an interrupt. Groups that cells have made are gone."""
        store = dist.PrefixStore(request.text, self._cluster.store)
        with suppress(Exception):
            dist.destroy_process_group()
        form_group(self._backend, store, self._cluster.rank, self._cluster.world_size, MAX_SECONDS)
        return Reply()


def _failure(error: BaseException) -> Reply:
    trace = traceback.TracebackException.from_exception(error)
    for part in (trace, trace.__cause__, trace.__context__):
        if part is not None:
            part.stack[:] = [frame for frame in part.stack if frame.filename != __file__]
    last = "".join(trace.format_exception_only()).strip().splitlines()[-1]
    return Reply(error=last, traceback="".join(trace.format()))
