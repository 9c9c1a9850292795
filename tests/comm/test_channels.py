"""Messages in both directions find their receives, with a group for each direction or one for both."""

import torch
import torch.distributed as dist

from comm.point_to_point import irecv, isend
from comm.wire.channels import Channels
from lab.cluster import Cluster
from lab.ranks import run_ranks


def test_messages_both_ways_arrive_with_the_directions_apart_or_together_in_parts_of_the_ranks_too():
    def exchange(cluster: Cluster) -> None:
        alone, two = dist.new_group([0]), dist.new_group([1, 2])
        for group in (None, alone if cluster.is_main else two):
            me, n = dist.get_rank(group), dist.get_world_size(group)
            for apart in (False, True, None):
                channels, pending = Channels(group, apart=apart), []
                for peer in [rank for rank in range(n) if rank != me]:
                    theirs = torch.empty(3)
                    pending.append((peer, theirs, irecv(theirs, peer, channels.of(peer, me))))
                    pending.append(
                        (me, None, isend(torch.full((3,), float(me)), peer, channels.of(me, peer)))
                    )
                for sender, theirs, transfer in pending:
                    transfer.wait()
                    assert theirs is None or theirs.tolist() == [sender] * 3
                assert n == 1 or (channels.of(0, 1) is channels.of(1, 0)) == (not apart)

    run_ranks(exchange, 3)
