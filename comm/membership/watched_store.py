"""The store of a job, watched: what waits at it for a rank that is gone ends with that rank's name.

torch's own store waits until its timeout, and prints C++ frames when the process that hosts it is gone.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness

_LONGEST_NAP = 0.02  # seconds between two looks at the store

T = TypeVar("T")


class WatchedStore(dist.PrefixStore):
    """The store behind a prefix; CommError for a rank that waits at it for another one that is gone.

    What it does not do: watch in a PrefixStore that is made of it, for that one asks torch's store itself.
    """

    def __init__(self, prefix: str, store: dist.Store, seconds: float) -> None:
        super().__init__(prefix, store)
        self._seconds = seconds

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits at the store: OP_TIMEOUT."""
        return timedelta(seconds=self._seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there. CommError when a rank is gone, or the time is up."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline, nap = time.monotonic() + seconds, 0.0005
        while not self.check(keys):
            if time.monotonic() > deadline:
                why = liveness.cause(0) or "it is stuck or paused, or waits itself for a rank that is"
                raise CommError(f"A rank has not come to the store within {seconds:g} s; {why}.")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there; CommError as `wait`."""
        self.wait([key])
        return self._asked(super().get, key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there; CommError when they are not and a rank has died or failed."""
        gone = liveness.cause(0)  # before the look: what a rank has written comes before its end
        if self._asked(super().check, keys):
            return True
        if gone is not None and gone.how != "finished":
            raise CommError(f"This rank waits for the others, but {gone}.")
        return False

    def set(self, key: str, value: str) -> None:
        """Write a key. CommError when the store is gone."""
        self._asked(super().set, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. CommError when the store is gone."""
        return self._asked(super().add, key, amount)

    def _asked(self, question: Callable[..., T], *args: Any) -> T:
        try:
            return question(*args)
        except dist.DistError as error:
            gone = liveness.cause() or "rank 0, which keeps it, has died; look into its log"
            raise CommError(f"The ranks' store is lost: {gone}.") from error
