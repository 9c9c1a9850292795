"""The pattern of a group's differentiable collectives (comm/functions.py), which take no pattern themselves.

use_pattern("ring")                      # the textbook's ring, in the group of all ranks
chosen_pattern("all_reduce")             # "ring"
"""

import weakref

import torch.distributed as dist

from comm.collectives import PATTERNS, Group, fastest_pattern
from comm.transport.wire import group_of

_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def use_pattern(pattern: str | None, group: Group = None) -> None:
    """Let `group` take this pattern from now on; None: the fastest one. All its ranks must do the same."""
    if pattern is None:
        _chosen.pop(group_of(group), None)
    else:
        _chosen[group_of(group)] = pattern


def chosen_pattern(op: str, group: Group = None) -> str:
    """Return the pattern that was chosen for the group, or the fastest one if `op` does not have that."""
    pattern = _chosen.get(group_of(group))
    return pattern if pattern in ("torch", *PATTERNS[op]) else fastest_pattern(op, group)
