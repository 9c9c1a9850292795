"""Messages in both directions find their receives, with a group for each direction or one for both."""

import time
from unittest import mock

import torch
import torch.distributed as dist

from comm.point_to_point import irecv, isend
from comm.transport.choice import use_transport
from comm.wire.channels import Channels
from comm.wire.wire import Wire
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


def connecting_at_the_first_message(cluster: Cluster, method):
    """Return a Wire's isend or irecv that blocks as nccl's does: until both ranks have reached it."""

    def start(wire: Wire, tensor: torch.Tensor, peer: int, *rest):
        pair = f"{wire.group.group_name}/{sorted((wire.rank, peer))}"
        if not cluster.store.check([f"{pair}/{wire.rank}"]):
            cluster.store.set(f"{pair}/{wire.rank}", "here")
            until = time.monotonic() + 2
            while not cluster.store.check([f"{pair}/{peer}"]):
                assert time.monotonic() < until, f"rank {wire.rank} waits to be connected to rank {peer}"
        return method(wire, tensor, peer, *rest)

    return start


def test_all_pairs_are_connected_before_the_first_message_where_connecting_holds_up_the_host():
    def two_microbatches(cluster: Cluster) -> None:
        use_transport("gloo")  # whose wire stands for nccl's here
        with (
            mock.patch.object(Wire, "isend", connecting_at_the_first_message(cluster, Wire.isend)),
            mock.patch.object(Wire, "irecv", connecting_at_the_first_message(cluster, Wire.irecv)),
        ):
            channels = Channels(None, {(0, 1), (1, 0)}, apart=True)
            activations, gradient = [torch.ones(2), torch.ones(3)], torch.zeros(1)
            if cluster.rank == 0:
                arriving = irecv(gradient, 1, channels.of(1, 0))  # early
                pending = [arriving, *(isend(one, 1, channels.of(0, 1)) for one in activations)]
            else:
                for one in activations:
                    irecv(one, 0, channels.of(0, 1)).wait()
                pending = [isend(gradient + 7, 0, channels.of(1, 0))]
            for transfer in pending:
                transfer.wait()
            assert gradient.item() == (7 if cluster.rank == 0 else 0)

    run_ranks(two_microbatches, 2)
