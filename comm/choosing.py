"""Measure alpha and beta of a group, from which `pattern="auto"` chooses the fastest pattern (cost.fastest).

      every rank sends to its right neighbour and receives from its left one, all at the same time

      seconds                          . beta: what each further byte costs
        |                      .
        |              .
        |  alpha .                             1 KiB                                     1 MiB
        +-------------------------------------------------------------------------------- bytes

All links are busy at once, as in most patterns. So ranks that share cores and memory measure a link that is
as slow as they will find it. It takes some milliseconds at the first "auto" of a group, and all ranks come to
the same numbers. MPI's libraries choose by such formulas or by measured tables (Pjesivac-Grbovic et al.,
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

SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 20
RUNS = 9
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Link]]" = weakref.WeakKeyDictionary()


def link_of(group: Group = None) -> Link:
    """Return alpha and beta between neighbours in the group. All its ranks call it at the same point."""
    if dist.get_world_size(group) == 1:
        return Link(0.0, 0.0)  # a rank alone sends nothing
    links = _links.setdefault(group_of(group), {})
    circumstances = chosen_transport(group), slow_link.current()
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
