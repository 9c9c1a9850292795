"""A job that catches mismatches and goes on runs out of file descriptors: each mismatch leaves two."""

import torch.distributed as dist

TARGET = "comm.transport.sockets._close_forgotten"
KILLER = "tests.comm.test_socket_ring.test_mismatches_leave_no_connection_behind"
CAUSE = "grow from one time to the next"

_kept: list[object] = []


def mutant(group: dist.ProcessGroup, pattern: str) -> None:
    from comm.transport import sockets

    _kept.append(sockets._forgotten.get(group, {}).pop(pattern, None))
