"""Keep the traffic ledger: the bytes and messages that this rank has sent, counted where they leave.

All traffic of the lessons goes through `comm`, which counts every message here. The messages of torch's own
collectives cannot be counted. For these the ledger holds the result of a formula, and marks it as such.

Before each collective the ranks compare what they call, in small messages called headers. They have rows of
their own, and no total or formula contains them: a count is the one on paper.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HEADER = "header"  # the pattern of messages in which ranks compare their calls
BACKGROUND = "background"  # the axis of a group whose messages may also leave between two steps


@dataclass(frozen=True)
class Traffic:
    """Hold the bytes and messages that one rank has sent. They can be added, subtracted and multiplied."""

    bytes_sent: int = 0
    messages_sent: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_sent + other.bytes_sent, self.messages_sent + other.messages_sent)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_sent - other.bytes_sent, self.messages_sent - other.messages_sent)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.bytes_sent * times, self.messages_sent * times)


@dataclass(frozen=True)
class Entry:
    """Name a row: the operation, its pattern, the axis of a mesh, and whether its traffic is by formula."""

    op: str
    pattern: str
    by_formula: bool = False
    axis: str = ""

    @property
    def is_header(self) -> bool:
        return self.pattern == HEADER


class Ledger:
    """Hold the traffic of this process, by entry. Several threads may write to it."""

    def __init__(self) -> None:
        # Plain tuples and lists, because to hash an Entry takes longer than to send a small message.
        self._rows: dict[tuple[str, str, bool, str], list[int]] = defaultdict(lambda: [0, 0])
        self._lock = threading.Lock()
        self._paused = threading.local()

    def __reduce__(self) -> str:
        # A function that is sent to a rank and uses LEDGER means the ledger of that rank.
        return "LEDGER"

    def count(
        self,
        op: str,
        pattern: str,
        num_bytes: int,
        messages: int = 1,
        axis: str = "",
        by_formula: bool = False,
    ) -> None:
        """Count messages as they leave, or `by_formula` those of an operation that cannot be counted."""
        if getattr(self._paused, "is_on", False):
            return
        with self._lock:
            row = self._rows[op, pattern, by_formula, axis]
            row[0] += num_bytes
            row[1] += messages

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that this thread sends in a `with` block: use it for calibration."""
        self._paused.is_on = True
        try:
            yield
        finally:
            self._paused.is_on = False

    def rows(self) -> dict[Entry, Traffic]:
        with self._lock:
            return {Entry(*key): Traffic(*row) for key, row in self._rows.items()}

    def total(self) -> Traffic:
        """Return the traffic of this process so far, without headers. Subtract two for what is between."""
        return sum((sent for entry, sent in self.rows().items() if not entry.is_header), Traffic())

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()


LEDGER = Ledger()
