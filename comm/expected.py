"""Compute the traffic that a collective of a group should cause on this rank, which the ledger counts."""

import torch.distributed as dist

from comm import cost
from comm.collectives import pattern_for
from comm.transport.hosts import known_hosts
from comm.transport.wire import Group
from lab.trace.ledger import Traffic


def expected(
    op: str, pattern: str | None, numel: int, itemsize: int, group: Group = None, root: int = 0
) -> Traffic:
    """Return the bytes and messages that the ledger will show on this rank for a collective of the group.

    `numel` counts the full tensor. `pattern` is what the collective is called with, also None or "auto".
    """
    chosen = pattern_for(op, pattern, numel * itemsize, group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return cost.per_rank(op, chosen, numel, itemsize, ranks, rank, root, known_hosts(group))
