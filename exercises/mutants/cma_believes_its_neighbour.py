"""A neighbour can have a rank read another process's memory: it never had to show the rank's own bytes."""

import socket

from comm import cma

TARGET = "comm.cma.verify"
KILLER = "tests.comm.test_cma.test_a_neighbour_that_shows_the_memory_of_a_third_process_is_not_read"


def mutant(left: socket.socket, nonce: bytes) -> int:
    cma._exactly(left, cma._ADDRESS.size)
    left.sendall(cma._READ)
    return cma._peer(left)
