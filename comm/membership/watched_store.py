"""A store that does not wait for a dead rank: its `wait` and `get` raise an error that names the rank.

torch's own store waits until its timeout, and prints C++ stack frames if its host has died.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness

_LONGEST_NAP = 0.02  # seconds between two checks of the store

T = TypeVar("T")


class WatchedStore(dist.PrefixStore):
    """The job's store, with a prefix for its keys. It raises CommError if another rank has died or failed.

    A PrefixStore made from this one does not do that, because it calls torch's store directly.
    """

    def __init__(self, prefix: str, store: dist.Store, seconds: float) -> None:
        super().__init__(prefix, store)
        self._seconds = seconds

    @property
    def timeout(self) -> timedelta:
        """The time for which a rank waits at the store: OP_TIMEOUT."""
        return timedelta(seconds=self._seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there. Raise CommError if a rank has died or failed, or at the timeout."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline, nap = time.monotonic() + seconds, 0.0005
        while not self.check(keys):
            if time.monotonic() > deadline:
                why = liveness.cause(0) or "it is stuck or paused, or waits for a rank that is"
                raise CommError(f"A rank has not written to the store within {seconds:g} s; {why}.")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value. Raise CommError as `wait` does."""
        self.wait([key])
        return self._asked(super().get, key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there. If not, and a rank has died or failed, raise CommError."""
        gone = liveness.cause(0)  # before the check below: a rank writes before it ends
        if self._asked(super().check, keys):
            return True
        if gone is not None and gone.how != "finished":
            raise CommError(f"This rank waits for the others, but {gone}.")
        return False

    def set(self, key: str, value: str) -> None:
        """Write a key. Raise CommError if the store has gone."""
        self._asked(super().set, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value. Raise CommError if the store has gone."""
        return self._asked(super().add, key, amount)

    def _asked(self, question: Callable[..., T], *args: Any) -> T:
        try:
            return question(*args)
        except dist.DistError as error:
            gone = liveness.cause() or liveness.Departure(0, "died")  # rank 0 hosts the store
            raise CommError(f"The ranks' store is lost: {gone}.") from error
