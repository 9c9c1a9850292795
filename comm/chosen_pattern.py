"""Choose the pattern of a group's collectives in comm/functions.py, whose functions take no `pattern`.

use_pattern("ring")                      # the textbook's ring, in the group of all ranks
chosen_pattern("all_reduce")             # "ring"
"""

import weakref

import torch.distributed as dist

from comm.collectives import PATTERNS, Group, default_pattern
from comm.wire.wire import group_of

_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def use_pattern(pattern: str | None, group: Group = None) -> None:
    """Let a group use this pattern from now on, or for None the default. All its ranks must call it."""
    if pattern is None:
        _chosen.pop(group_of(group), None)
    else:
        _chosen[group_of(group)] = pattern


def chosen_pattern(op: str, group: Group = None) -> str:
    """Return the pattern chosen for the group; if none is chosen or `op` lacks it, the default."""
    pattern = _chosen.get(group_of(group))
    return pattern if pattern in ("auto", "torch", *PATTERNS[op]) else default_pattern(op, group)
