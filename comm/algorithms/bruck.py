"""Bruck's patterns: an all-gather and an all-to-all in which a rank sends only ceil(log2 n) messages.

      all-gather on 5 ranks: rank 0 receives        all-to-all on 5 ranks: a part that goes d ranks to the
      round 1   from 1   the shard of 1             right moves in the rounds of d's binary digits
      round 2   from 2   those of 2 3               round 1   1 to the right   the parts with d = 1 3
      round 3   from 4   that of 4 (0 is known)     round 2   2 to the right   the parts with d = 2 3
                                                    round 3   4 to the right   the part with d = 4

All-gather: after round k a rank has the shards of 2^k ranks: its own and those to its right. So every round
doubles what it has, and the last one completes it. For B bytes and L = ceil(log2 n) rounds that takes
L alpha + (n-1)/n B beta seconds (cost.py): as few bytes as the ring, in fewer messages. In return a rank
copies the full tensor once more, from the order in which it arrived to the order of the ranks.

All-to-all: a part travels through other ranks. It moves 1, 2, 4, ... ranks to the right, wherever its
distance has the binary digit 1. About half of all parts move in each round, so it takes L alpha +
(L/2) B beta. That is more bytes than in pairwise.py, where a part goes directly, and fewer messages. It pays
if the parts are small. They must all have one size: a rank passes on parts that it was never told about.

Both work for every number of ranks. Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", 1997.
"""

import torch

from comm.shards import shard_sizes
from comm.wire.wire import Wire


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to every rank's `full`."""
    n, r = wire.size, wire.rank
    sizes = shard_sizes(full.numel(), n)
    from_here = sizes[r:] + sizes[:r]
    known = torch.empty_like(full)  # the shards of the ranks r, r+1, r+2, ..., modulo n
    known[: shard.numel()].copy_(shard)
    have = 1
    while have < n:
        count = min(have, n - have)
        outgoing = known[: sum(from_here[:count])]
        incoming = known[sum(from_here[:have]) : sum(from_here[: have + count])]
        _exchange(wire, outgoing, (r - have) % n, incoming, (r + have) % n)
        have += count
    before = sum(sizes[:r])  # elements of the lower ranks, which are the last ones in `known`
    full[before:].copy_(known[: full.numel() - before])
    full[:before].copy_(known[full.numel() - before :])


def all_to_all(wire: Wire, output: torch.Tensor, full: torch.Tensor) -> None:
    """Send part p of `full` to rank p, and receive part p of `output` from it. All parts have one size."""
    n, r = wire.size, wire.rank
    size = full.numel() // n
    given = full.view(n, size)
    parts = [given[(r + d) % n] for d in range(n)]  # parts[d] goes d ranks to the right
    distance = 1
    while distance < n:
        moving = [d for d in range(n) if d & distance]
        leaving = torch.cat([parts[d] for d in moving])
        arriving = torch.empty_like(leaving)
        _exchange(wire, leaving, (r + distance) % n, arriving, (r - distance) % n)
        for d, part in zip(moving, arriving.view(len(moving), size), strict=True):
            parts[d] = part
        distance *= 2
    for d, part in enumerate(parts):  # it has come d ranks to the right
        output.view(n, size)[(r - d) % n].copy_(part)


def _exchange(wire: Wire, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send to one rank and receive from another, at the same time. (A wire does not send an empty tensor.)"""
    arriving, leaving = wire.irecv(incoming, source), wire.isend(outgoing, to)
    arriving.wait()
    leaving.wait()
