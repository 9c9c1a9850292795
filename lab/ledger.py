"""The traffic ledger: what this rank has sent, counted where the bytes leave.

`comm` counts every message here. Nothing else may send, so the ledger is the whole truth, except for
what torch's own collectives send out of our sight: for those it holds the *formula*, and marks it so.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages one rank has sent. Traffic of two times can be added and subtracted."""

    bytes_sent: int = 0
    messages_sent: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_sent + other.bytes_sent, self.messages_sent + other.messages_sent)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_sent - other.bytes_sent, self.messages_sent - other.messages_sent)


@dataclass(frozen=True)
class Entry:
    """The name under which traffic is kept: the operation, who did the work, counted or by formula."""

    op: str
    pattern: str
    by_formula: bool = False


class Ledger:
    """Traffic of this process by entry; safe to write from the communication thread."""

    def __init__(self) -> None:
        self._rows: dict[Entry, Traffic] = defaultdict(Traffic)
        self._lock = threading.Lock()

    def __reduce__(self) -> str:
        # A cell that mentions LEDGER means the ledger of the rank it will run in.
        return "LEDGER"

    def count(self, op: str, pattern: str, num_bytes: int, messages: int = 1) -> None:
        """Count messages as they are handed to the network."""
        self._add(Entry(op, pattern), Traffic(num_bytes, messages))

    def add_formula(self, op: str, pattern: str, traffic: Traffic) -> None:
        """Add what a formula says that an operation sends whose messages cannot be counted."""
        self._add(Entry(op, pattern, by_formula=True), traffic)

    def _add(self, entry: Entry, traffic: Traffic) -> None:
        with self._lock:
            self._rows[entry] += traffic

    def rows(self) -> dict[Entry, Traffic]:
        """A copy of all rows so far."""
        with self._lock:
            return dict(self._rows)

    def total(self) -> Traffic:
        """All traffic of this process so far; subtract two totals to get a span's."""
        return sum(self.rows().values(), Traffic())

    def clear(self) -> None:
        """Forget everything, for tests and for a fresh measurement."""
        with self._lock:
            self._rows.clear()


LEDGER = Ledger()
