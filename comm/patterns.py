"""List the patterns of each collective, choose one for a group, and measure the link that "auto" goes by.

use_pattern("tree", group)                 # from now on a collective of this group with pattern=None uses it
chosen_pattern("all_reduce", group)        # "tree"
default_pattern("all_reduce", group)       # "ring", the first one listed; "torch" in a group that uses nccl

`pattern="auto"` takes the pattern that is predicted to be fastest (cost.fastest), from the group's alpha and
beta. `measure_link` finds them: every rank sends to its right neighbour and receives from its left one, all
at the same time, as in most patterns. So ranks that share cores and memory measure a link that is as slow as
they will find it. MPI's libraries choose by such formulas or by measured tables (Pjesivac-Grbovic et al.,
"Performance analysis of MPI collective operations", 2007).
"""

import statistics
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from comm.algorithms import (
    bruck,
    hierarchical,
    hypercube,
    pairwise,
    pipelined_ring,
    ring,
    sharded_tree,
    star,
    tree,
)
from comm.wire import slow_link
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import Group, group_of, message_device
from comm.wire.slow_link import Link
from comm.wire.transfers import AnyTransfer, irecv, isend
from comm.wire.transport import chosen_transport
from lab.trace.ledger import LEDGER
from lab.trace.stream_clock import time_when_done

ALGORITHMS: dict[str, dict[str, Callable[..., None]]] = {  # the first one of each line is the default
    "broadcast": {"tree": tree.broadcast, "flat": star.broadcast},
    "scatter": {"flat": star.scatter},
    "gather": {"flat": star.gather},
    "reduce": {"tree": tree.reduce, "flat": star.reduce},
    "all_gather": {
        "ring": ring.all_gather,
        "pipelined_ring": pipelined_ring.all_gather,
        "tree": sharded_tree.all_gather,
        "bruck": bruck.all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "pipelined_ring": pipelined_ring.reduce_scatter,
        "tree": sharded_tree.reduce_scatter,
    },
    "all_reduce": {
        "ring": ring.all_reduce,
        "pipelined_ring": pipelined_ring.all_reduce,
        "tree": tree.all_reduce,
        "flat": star.all_reduce,
        "recursive_doubling": hypercube.recursive_doubling,
        "halving_doubling": hypercube.halving_doubling,
        "hierarchical": hierarchical.all_reduce,
    },
    "all_to_all": {"pairwise": pairwise.all_to_all, "bruck": bruck.all_to_all},
    "barrier": {"tree": lambda wire: None},  # the exchange of headers is all
}
PATTERNS = {op: tuple(patterns) for op, patterns in ALGORITHMS.items()}
SMALL_BYTES, RUNS = 4, 9  # of the messages that measure a link
_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Link]]" = weakref.WeakKeyDictionary()


def default_pattern(op: str, group: Group = None) -> str:
    """Return the pattern of a group for which none is chosen."""
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


def link_of(group: Group = None, ring: Sequence[int] | None = None) -> Link:
    """Return alpha and beta for "auto": of the group, or among the ranks in this rank's `ring`.

    They are measured once, when all ranks of the group call this.
    """
    links = _links.setdefault(group_of(group), {})
    circumstances = chosen_transport(), slow_link.current(), ring is None
    if circumstances not in links:
        links[circumstances] = measure_link(group, large_bytes=1 << 20, ring=ring)
    return links[circumstances]


def measure_link(
    group: Group = None,
    large_bytes: int = 4 << 20,
    device: torch.device | None = None,
    ring: Sequence[int] | None = None,
) -> Link:
    """Return alpha and beta between neighbours, from the times of tiny and of large messages.

    All ranks call it, and get the same numbers. The messages are tensors on `device`: with gloo those of a
    GPU take longer than those of the host. A rank's neighbours are those in its `ring`, some ranks of the
    group, by default all. A rank alone sends nothing: both numbers are 0.
    """
    ring = ring or range(dist.get_world_size(group))
    if len(ring) == 1:
        return Link(0.0, 0.0)
    device = device or message_device(group)
    with LEDGER.paused():
        small, large = (_seconds(size, group, device, ring) for size in (SMALL_BYTES, large_bytes))
    return Link(small, max(0.0, large - small) / (large_bytes - SMALL_BYTES))


def _seconds(num_bytes: int, group: Group, device: torch.device, ring: Sequence[int]) -> float:
    """Return the median seconds of a message in both directions: the slowest rank's."""
    n, position = len(ring), ring.index(dist.get_rank(group))
    left, right = ring[(position - 1) % n], ring[(position + 1) % n]
    mine, theirs = torch.zeros(2, num_bytes // 4, device=device)
    times = []
    for _ in range(RUNS):
        start = time_when_done(device)
        if dist.get_backend(group) == "nccl":
            transfers: Sequence[AnyTransfer] = peer_wire(group).batch(mine, right, theirs, left)
        else:
            transfers = [irecv(theirs, left, group), isend(mine, right, group)]
        for transfer in transfers:
            transfer.wait()
        times.append((time_when_done(device) - start) / 1e9)
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=message_device(group))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks must get the same number
    return slowest.item()
