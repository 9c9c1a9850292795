"""Channels: plain messages in both directions between two ranks that never stand in each other's way.

      gloo    a message waits for its receive, and for nothing else
      nccl    a pair of ranks has one queue, first in, first out, for both directions:

              rank 0   receive b   send a ...      the send of a stands behind a receive that waits for b,
              rank 1   receive a   send b ...      the send of b behind one that waits for a: for ever

So on nccl messages to lower ranks get a group of their own. Then each queue has one direction, in which the
order of the sends is that of the receives.
"""

import torch.distributed as dist

from comm.wire import Group, group_of, names_of


class Channels:
    """The group to use for messages from one rank to another. All ranks of `group` must make it together.

    `apart`: whether the directions get groups of their own; None is yes on nccl, and no elsewhere.
    """

    def __init__(self, group: Group = None, apart: bool | None = None) -> None:
        whole = group_of(group)
        self._up = self._down = group
        if dist.get_backend(whole) == "nccl" if apart is None else apart:
            self._down = dist.new_group(names_of(whole), use_local_synchronization=True)

    def of(self, source: int, destination: int) -> Group:
        """Where `source` sends to `destination`, and that one receives from `source`: ranks of the group."""
        return self._up if source < destination else self._down
