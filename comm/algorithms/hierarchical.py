"""The hierarchical all-reduce: reduce within each host first, so that less travels between hosts.

      host 0                  host 1
      rank 0 ◄────────2─────► rank 2      1  reduce-scatter within each host: each of its m ranks gets one
        ▲                       ▲            of m shards, summed over the host
       1,3                     1,3        2  all-reduce of each shard between the h hosts, among the ranks
        ▼                       ▼            that own it
      rank 1 ◄────────2─────► rank 3      3  all-gather within each host

Within a host there is fast memory, and between hosts a slow network. Each of the h hosts has m ranks here,
so n = h m. In step 2 the ranks of a host together send 2 (h-1)/h B bytes to other hosts. If all hosts send
the same amount, no all-reduce sends less (ring.py). In a flat ring a rank whose right neighbour is on
another host sends 2 (n-1)/n B there. On 2 hosts with 2 ranks each that is B bytes from each host beside 3/2
B. If the ranks take turns (0 and 2 on one host), it is B beside 3 B, because then every link of the ring
leaves its host.

The steps are rings (ring.py). With alpha and beta within a host, and a latency of A seconds and b seconds per
byte on the link of a host, which its ranks share, they take

      2 (m-1) (alpha + (B/m) beta) + 2 (h-1) (A + (B/h) b)                (cost.py)

A large tensor is cut into blocks. While one block is in step 2, others are in steps 1 and 3, so the network
does not wait for the memory: the second term alone is nearly the whole time.

Where hosts have different numbers of ranks, their shards do not match, and the pattern is refused.

Every host ends step 2 with the same bits, so all ranks end bitwise equal.

Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, section 4.1, reduce within a
server first, to one buffer. Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE divides the buffer among the ranks of a
server, as above.
"""

from collections.abc import Iterator, Sequence

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.errors import Mismatch
from comm.shards import SEGMENT_BYTES, segments_of, shards_of
from comm.wire.hosts import hosts_of
from comm.wire.wire import Transfer, Wire


def all_reduce(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Replace every rank's `tensor` by the reduction of all. `hosts_of` says which ranks share a host."""
    by_host = ranks_by_host(hosts_of(wire))
    if len({len(ranks) for ranks in by_host}) > 1:
        wire.finish_handshake()
        numbers = ", ".join(str(len(ranks)) for ranks in by_host)
        raise Mismatch(
            f"all_reduce: the hosts have {numbers} ranks, and the pattern hierarchical needs equally many on "
            "each; take ring."
        )
    own_host = SomeRanks(wire, next(ranks for ranks in by_host if wire.rank in ranks))
    owners = SomeRanks(wire, [ranks[own_host.rank] for ranks in by_host])
    blocks = segments_of(tensor, wire.size * SEGMENT_BYTES // 2)  # they follow one another through the steps
    waiting = [_steps(own_host, owners, block, op) for block in blocks]
    under_way: list[Iterator[None]] = []
    while waiting or under_way:
        under_way += waiting[:1]  # in each round another block starts, and all others go one step on
        del waiting[:1]
        under_way = [block for block in under_way if next(block, "done") is None]


def _steps(own_host: Wire, owners: Wire, block: torch.Tensor, op: str) -> Iterator[None]:
    """All-reduce a block. Yield while its messages travel, so that other blocks can go on."""
    combined = "sum" if op == "mean" else op  # the mean divides once, when the sum is complete
    shards = shards_of(block, own_host.size)
    yield from _reduce_scatter(own_host, shards, combined)
    parts = shards_of(shards[own_host.rank], owners.size)
    yield from _reduce_scatter(owners, parts, combined)
    divide_if_mean(op, parts[owners.rank], own_host.size * owners.size)
    yield from _all_gather(owners, parts)
    yield from _all_gather(own_host, shards)


def _reduce_scatter(wire: Wire, chunks: list[torch.Tensor], op: str) -> Iterator[None]:
    """Do what ring.reduce_chunks does, one step at a time."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        mine = chunks[(r - 2 - step) % n]
        arrived = torch.empty_like(mine)
        transfers = _shift(wire, chunks[(r - 1 - step) % n], arrived)
        yield
        _wait_all(transfers)
        combine(op, arrived, mine, out=mine)


def _all_gather(wire: Wire, chunks: list[torch.Tensor]) -> Iterator[None]:
    """Do what ring.gather_chunks does, one step at a time."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        transfers = _shift(wire, chunks[(r - step) % n], chunks[(r - 1 - step) % n])
        yield
        _wait_all(transfers)


def _shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> list[Transfer]:
    """Start to send to rank r+1 and to receive from rank r-1."""
    left, right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    return [wire.irecv(incoming, left), wire.isend(outgoing, right)]


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, from the number of each rank's host."""
    return [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]


class SomeRanks(Wire):
    """A wire among some ranks of another wire, this one included, which it numbers from 0."""

    def __init__(self, wire: Wire, members: Sequence[int]) -> None:
        self._wire, self._members = wire, members
        self.rank, self.size = members.index(wire.rank), len(members)

    def isend(self, tensor: torch.Tensor, dst: int, header: bool = False) -> Transfer:
        return self._wire.isend(tensor, self._members[dst])

    def irecv(self, tensor: torch.Tensor, src: int, header: bool = False) -> Transfer:
        return self._wire.irecv(tensor, self._members[src])
