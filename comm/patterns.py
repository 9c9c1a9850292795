"""List the patterns of each collective, and choose one for a group.

use_pattern("tree", group)                 # from now on the functions of comm/functions.py use it there
chosen_pattern("all_reduce", group)        # "tree"
default_pattern("all_reduce", group)       # "ring", the first one listed; "torch" in a group that uses nccl
"""

import weakref

import torch.distributed as dist

from comm.wire.wire import Group, group_of

RINGS = ("ring", "pipelined_ring")
PATTERNS = {
    "broadcast": ("tree", "flat"),
    "scatter": ("flat", "tree"),
    "gather": ("flat", "tree"),
    "reduce": ("tree", "flat", "pairwise"),
    "all_gather": (*RINGS, "tree", "pairwise", "bruck"),
    "reduce_scatter": (*RINGS, "tree", "pairwise"),
    "all_reduce": (
        *(*RINGS, "tree", "flat", "recursive_doubling", "halving_doubling"),
        *("pairwise", "hierarchical"),
    ),
    "all_to_all": ("pairwise", "bruck"),
    "barrier": ("tree",),
}
_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def default_pattern(op: str, group: Group = None) -> str:
    """Return the pattern that `pattern=None` stands for in this group."""
    return "torch" if dist.get_backend(group) == "nccl" else PATTERNS[op][0]


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
