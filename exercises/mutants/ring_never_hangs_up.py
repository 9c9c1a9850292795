"""A job that catches mismatches and goes on runs out of file descriptors: each mismatch leaves some."""

from comm.transport.streams import Streams

TARGET = "comm.transport.streams.Streams.close"
KILLER = "tests.comm.test_stream_failures.test_mismatches_leave_no_connection_and_no_memory_behind"
CAUSE = "grow from one time to the next"

_kept: list[object] = []


def mutant(self: Streams) -> None:
    _kept.append(self)
