"""Channels let plain messages travel in both directions between two ranks without waiting for each other.

      gloo    a message waits for its receive, and for nothing else
      nccl    a pair of ranks has one queue, first in, first out, for both directions:

              rank 0   receive b   send a ...      the send of a stands behind a receive that waits for b,
              rank 1   receive a   send b ...      the send of b behind one that waits for a: for ever

So on nccl messages to lower ranks get a group of their own. Then each queue has one direction, in which the
order of the sends is that of the receives.

And nccl connects two ranks at their first message, which holds up each one's host until the other one has
come to that message too. In a schedule that can be a circle:

      rank 0   posts the receive of a gradient early, and is held up until rank 1 sends it
      rank 1   computes no gradient before it has the second activation, which rank 0 has not sent

So all pairs are connected beforehand, by all ranks in the same order.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from comm.transport.wire import Group, global_ranks, group_of, message_device, peer_wire


class Channels:
    """The group to use for messages from one rank to another.

    `group` is the caller's own, perhaps another one on other ranks: *all* ranks there are make it together.
    `pairs`: who sends to whom, (source, destination) in ranks of the group; the same on all of its ranks.
    `apart`: whether the directions get groups of their own; None is yes on nccl, and no elsewhere.
    """

    def __init__(
        self, group: Group = None, pairs: Iterable[tuple[int, int]] = (), apart: bool | None = None
    ) -> None:
        self._up = self._down = group
        if dist.get_backend(group) == "nccl" if apart is None else apart:
            for members in _everyones(global_ranks(group_of(group))):
                made = dist.new_group(members)  # which every rank has to call, of the group or not
                self._down = made if dist.get_rank() in members else self._down
            self._connect(sorted(set(pairs)))

    def of(self, source: int, destination: int) -> Group:
        """Where `source` sends to `destination`, and that one receives from `source`: ranks of the group."""
        return self._up if source < destination else self._down

    def _connect(self, pairs: list[tuple[int, int]]) -> None:
        """Send a first message from each source to its destination, one pair after the other."""
        for source, destination in pairs:
            wire = peer_wire(self.of(source, destination), counted=False)
            if wire.rank == source:
                wire.isend(torch.zeros(1, device=message_device(wire.group)), destination).wait()
            elif wire.rank == destination:
                wire.irecv(torch.zeros(1, device=message_device(wire.group)), source).wait()


def _everyones(members: list[int]) -> list[list[int]]:
    """The groups of all ranks, each once, in the same order everywhere."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=message_device(None))
    mine[members] = 1
    rows = [torch.empty_like(mine) for _ in range(len(mine))]
    dist.all_gather(rows, mine)
    return [list(one) for one in sorted({tuple(row.nonzero().flatten().tolist()) for row in rows})]
