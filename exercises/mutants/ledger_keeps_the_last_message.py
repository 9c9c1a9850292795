"""The traffic report is too small: of each collective only the last message is counted."""

from lab.trace.ledger import Ledger

TARGET = "lab.trace.ledger.Ledger.count"
KILLER = "tests.comm.test_cost.test_the_bytes_of_every_message_are_counted_and_not_its_elements"
CAUSE = "left out"


def mutant(self: Ledger, op: str, pattern: str, num_bytes: int, messages: int = 1, axis: str = "") -> None:
    with self._lock:
        self._rows[op, pattern, False, axis] = [num_bytes, messages]
