"""Let plain messages between two ranks travel in both directions without a deadlock, on nccl too.

On nccl a pair of ranks has one queue, first in, first out, for both directions. That can be a deadlock:

      rank 0   receive b   send a         the send of a waits behind a receive that waits for b
      rank 1   receive a   send b         the send of b waits behind a receive that waits for a

So on nccl the messages to lower ranks use a second group of the same ranks, and each queue has one direction.

Also, nccl connects two ranks at their first message, and blocks the host of each rank until the other one
reaches that message too. In a pipeline schedule rank 0 would be blocked in the receive of a gradient, which
rank 1 cannot compute before rank 0 has sent it the second activation. So all ranks connect all pairs
beforehand, in the same order.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from comm.exchange import exchange
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import Group, axis_of, global_ranks, group_of, message_device, name_axis, new_group

# Each rank launches what it sends and receives in several groups in an order of its own. If nccl began all
# in this order, a send could wait for a receive whose message depends on it. nccl reads this at its start.
os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "0")


class Channels:
    """Choose the group in which a message travels, by its direction.

    All ranks of the job must create their channels at the same time, each with its own `group`. `pairs` lists
    the (source, destination) of all messages, in ranks of the group, and is equal on all its ranks.
    """

    def __init__(self, group: Group, pairs: Iterable[tuple[int, int]]) -> None:
        self._up = self._down = group
        if dist.get_backend(group) == "nccl":
            # Every rank must make every group, member or not.
            for members in sorted({tuple(each) for each in exchange(global_ranks(group_of(group)))}):
                made = new_group(list(members))
                self._down = made if dist.get_rank() in members else self._down
            name_axis(self._down, axis_of(group))
            self._connect(sorted(set(pairs)))

    def of(self, source: int, destination: int) -> Group:
        """Return the group in which rank `source` sends to rank `destination`, both ranks of the group."""
        return self._up if source < destination else self._down

    def _connect(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            wire = peer_wire(self.of(source, destination), counted=False)
            if wire.rank == source:
                wire.isend(torch.zeros(1, device=message_device(wire.group)), destination).wait()
            elif wire.rank == destination:
                wire.irecv(torch.zeros(1, device=message_device(wire.group)), source).wait()
