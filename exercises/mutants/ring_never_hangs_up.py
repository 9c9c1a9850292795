"""A job that catches mismatches and goes on runs out of file descriptors: each costs it two connections."""

import torch.distributed as dist

TARGET = "comm.sockets._close_forgotten"
KILLER = "tests.comm.test_tcp.test_mismatches_leave_no_connection_behind"

_kept: list[object] = []


def mutant(group: dist.ProcessGroup, pattern: str) -> None:
    from comm import sockets

    _kept.append(sockets._forgotten.get(group, {}).pop(pattern, None))
