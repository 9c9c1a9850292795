"""A neighbour can make a rank read any process's memory: the rank does not look for its nonce there."""

import socket

from comm.transport import cross_memory

TARGET = "comm.transport.cross_memory.verify"
KILLER = "tests.comm.test_cross_memory.test_a_neighbour_that_shows_the_memory_of_a_third_process_is_not_read"


def mutant(left: socket.socket, nonce: bytes) -> int:
    cross_memory._exactly(left, cross_memory._ADDRESS.size)
    left.sendall(cross_memory._READ)
    return cross_memory.peer_of(left)
