"""List the patterns of each collective, choose one for a group, and measure the link that "auto" goes by.

use_pattern("tree", group)                 # from now on the functions of comm/functions.py use it there
chosen_pattern("all_reduce", group)        # "tree"
default_pattern("all_reduce", group)       # "ring", the first one listed; "torch" in a group that uses nccl

`pattern="auto"` takes the pattern that is predicted to be fastest (cost.fastest), from the group's alpha and
beta. `link_of` measures them: every rank sends to its right neighbour and receives from its left one, all at
the same time, as in most patterns. So ranks that share cores and memory measure a link that is as slow as
they will find it. MPI's libraries choose by such formulas or by measured tables (Pjesivac-Grbovic et al.,
"Performance analysis of MPI collective operations", 2007).
"""

import statistics
import time
import weakref

import torch
import torch.distributed as dist

from comm.transport.choice import chosen_transport
from comm.transport.messages import irecv, isend
from comm.wire import slow_link
from comm.wire.slow_link import Link
from comm.wire.wire import Group, group_of
from lab.trace.ledger import LEDGER

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
SMALL_BYTES, LARGE_BYTES, RUNS = 1 << 10, 1 << 20, 9  # of the messages that measure a link
_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Link]]" = weakref.WeakKeyDictionary()


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


def link_of(group: Group = None) -> Link:
    """Return alpha and beta between neighbours in the group. All its ranks call it at the same point."""
    if dist.get_world_size(group) == 1:
        return Link(0.0, 0.0)  # a rank alone sends nothing
    links = _links.setdefault(group_of(group), {})
    circumstances = chosen_transport(), slow_link.current()
    if circumstances not in links:
        with LEDGER.paused():
            small, large = (_seconds(size, group) for size in (SMALL_BYTES, LARGE_BYTES))
        links[circumstances] = Link(small, max(0.0, large - small) / (LARGE_BYTES - SMALL_BYTES))
    return links[circumstances]


def _seconds(num_bytes: int, group: Group) -> float:
    """Return the median seconds of a message in both directions: the slowest rank's."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    mine, theirs, times = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4), []
    for _ in range(RUNS):
        start = time.perf_counter()
        for transfer in (irecv(theirs, (rank - 1) % n, group), isend(mine, (rank + 1) % n, group)):
            transfer.wait()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks must get the same number
    return slowest.item()
