"""The hierarchical all-reduce: reduce within each host first, so that less travels between hosts.

      host 0                host 1
      rank 0 ◄───► rank 1   rank 2 ◄───► rank 3       1  reduce-scatter within each host: each of its m ranks
        ▲            ▲        ▲            ▲             gets one of m shards, summed over the host
        │            └────────┼────────────┘          2  all-reduce of each shard, among the ranks that own
        └─────────────────────┘                          it on the h hosts: 0 and 2, 1 and 3
                                                      3  all-gather within each host

Between the ranks of a host there is fast memory, and between hosts a slow network. Each of the h hosts has m
ranks here, and n = h m. In step 2 the ranks of a host together send 2 (h-1)/h B bytes to other hosts. That is
the least with which the hosts can add up B bytes. In a flat ring a rank whose right neighbour is on another
host sends 2 (n-1)/n B there. On 2 hosts with 2 ranks each that is B bytes beside 3/2 B, or beside 3 B if the
ranks take turns (0 and 2 on one host), because then every link of the ring leaves its host.

The steps are rings (pipelined_ring.py). With alpha and beta within a host, and a latency of A seconds and b
seconds per byte on the link of a host, which its ranks share, they take

      2 (m-1) (alpha + (B/m) beta) + 2 (h-1) (A + (B/h) b)                (cost.py)

Where hosts have different numbers of ranks, their shards do not match. Then each host reduces to its lowest
rank, its leader; the leaders form a ring; and each leader broadcasts the result to its host (tree.py).

Every host ends step 2 with the same bits, so all ranks end bitwise equal.

Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, section 4.1, reduce within a
server first, to one buffer. Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE divides the buffer among the ranks of a
server, as above.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from comm.algorithms import pipelined_ring, tree
from comm.algorithms.reduction import divide_if_mean
from comm.shards import shards_of
from comm.transport.segment_receiver import AHEAD
from comm.transport.wire import Wire


def all_reduce(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Replace every rank's `tensor` by the reduction of all. `wire.hosts` says which ranks share a host."""
    by_host = ranks_by_host(wire.hosts)
    own_host = among(wire, next(ranks for ranks in by_host if wire.rank in ranks))
    combined = "sum" if op == "mean" else op  # the mean divides once, when the sum is complete
    if len({len(ranks) for ranks in by_host}) == 1:
        owners = among(wire, [ranks[own_host.rank] for ranks in by_host])
        shard = torch.empty_like(shards_of(tensor, own_host.size)[own_host.rank])
        pipelined_ring.reduce_scatter(own_host, shard, tensor, combined)
        pipelined_ring.all_reduce(owners, shard, combined)
        divide_if_mean(op, shard, wire.size)
        pipelined_ring.all_gather(own_host, tensor, shard)
    else:
        tree.reduce(own_host, tensor, combined, root=0)
        if own_host.rank == 0:
            pipelined_ring.all_reduce(among(wire, [ranks[0] for ranks in by_host]), tensor, combined)
            divide_if_mean(op, tensor, wire.size)
        tree.broadcast(own_host, tensor, root=0)


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, from the number of each rank's host."""
    return [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]


def among(wire: Wire, members: Sequence[int]) -> Wire:
    """Return a wire among some ranks of `wire`, this one included, which it numbers from 0."""
    return cast(Wire, _SomeRanks(wire, members))


class _SomeRanks:
    """A wire among some ranks of another wire, with what an algorithm uses of it."""

    def __init__(self, wire: Wire, members: Sequence[int]) -> None:
        self._wire, self._members = wire, members
        self.rank, self.size = members.index(wire.rank), len(members)
        self.receives_ahead = getattr(wire, "receives_ahead", AHEAD)

    def isend(self, tensor: torch.Tensor, dst: int) -> Any:
        return self._wire.isend(tensor, self._members[dst])

    def irecv(self, tensor: torch.Tensor, src: int) -> Any:
        return self._wire.irecv(tensor, self._members[src])
