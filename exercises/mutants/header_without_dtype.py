"""One rank sends integers, the others floats: there is no error, and the sum is garbage."""

from comm.transport.handshake import Header

TARGET = "comm.transport.handshake._common"
KILLER = "tests.comm.test_handshake.test_another_dtype_of_the_same_width_is_a_mismatch"
CAUSE = "left out of what the ranks compare"
SYMPTOM = "One rank sends integers, the others floats, and there is no error."


def mutant(header: Header) -> tuple:
    return header.op, header.pattern, header.reduction, header.root
