"""Ranks that pass different dtypes get garbage: over streams each gets all headers, and compares none."""

from comm.transport.handshake import ROW_BYTES, Header, rows_of

TARGET = "comm.transport.stream_wire.StreamHandshake.finish"
KILLER = "tests.comm.test_handshake.test_another_dtype_of_the_same_width_is_a_mismatch"
CAUSE = "left out of what the ranks compare"
SYMPTOM = "One rank sends integers, the others floats: over gloo that is an error, and over sockets garbage."


def mutant(self) -> int:
    wire = self._wire
    while True:
        self._arriving.wait()
        self._have += self._count
        if self._have == wire.size:
            break
        self._start_round()
    here = (wire.size - wire.rank) * ROW_BYTES
    rows = bytes(self._rows[here:]) + bytes(self._rows[:here])
    wire.full_numel = self._mine.full
    if self._mine.op in ("scatter", "gather"):
        wire.full_numel = max(Header.unpack(row).full for row in rows_of(rows))
    return max(Header.unpack(row).ready for row in rows_of(rows))
