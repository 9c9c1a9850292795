"""On rank 0: know by the connections of the others who is alive, and decide who is in the next group."""

import json
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from comm.membership import liveness


class Coordinator:
    """Holds the connections of rank 0 to the `members` of its group, and to the ranks that ask to join it.

    `asking` are the members that wait for a new group. A rank sends its name when it comes, and again when it
    asks. It gets an empty list as a call to regroup, and then the list of `decide`.
    """

    def __init__(self, store: dist.Store, ranks: int, patience: float) -> None:
        self.patience, self._groups, self._joins = patience, 0, 0
        self._listener = liveness.listen(store)
        self.port = self._listener.getsockname()[1]
        self.members, self._new = dict[Connection, int](), dict[Connection, int]()
        self.asking: set[int] = set()
        deadline = time.monotonic() + patience
        while len(self.newcomers()) < ranks - 1 and time.monotonic() < deadline:
            self.hear(0.1)
        self.members, self._new = self.newcomers(), {}

    def hear(self, seconds: float) -> None:
        """Note, for at most `seconds`, who comes, asks for a new group, or has died."""
        for ready in wait([self._listener, *self.members, *self._new], seconds):
            if not isinstance(ready, Connection):
                self._new[liveness.accept(self._listener)] = -1  # it has not said its name yet
                continue
            try:
                name = int(json.loads(ready.recv_bytes(liveness.LONGEST))["rank"])
                if ready in self._new:
                    self._new[ready] = name
                else:
                    self.asking.add(name)
            except Exception:  # it has died, or is no rank
                self.members.pop(ready, None)
                self._new.pop(ready, None)

    def newcomers(self) -> dict[Connection, int]:
        """Return the ranks that ask to join."""
        self.hear(0)
        return {connection: name for connection, name in self._new.items() if name >= 0}

    def decide(self) -> list[Any]:
        """Send and return who hangs, who is in the next group, and who has joined it; then how many groups
        there have been so far, and how many ranks have joined one."""
        came = self.newcomers()
        self._new = dict.fromkeys(self._new.keys() - came.keys(), -1)
        self.members |= came
        self._send([])
        deadline = time.monotonic() + self.patience
        while (silent := {*self.members.values()} - self.asking) and time.monotonic() < deadline:
            self.hear(max(0.0, deadline - time.monotonic()))
        joined = sorted(came[connection] for connection in came.keys() & self.members.keys())
        self._groups, self._joins = self._groups + 1, self._joins + len(joined)
        names = sorted({0, *self.members.values()})
        agreed = [sorted(silent), names, joined, self._groups, self._joins]
        self._send(agreed)
        self.asking.clear()
        return agreed

    def _send(self, message: Any) -> None:
        for connection in self.members:
            liveness.send(connection, message)
