"""Ranks compute with different weights: each puts gathered shards together in the order of arrival."""

import torch

from comm.shards import shards_of
from comm.transport.wire import Wire

TARGET = "comm.algorithms.pipelined_ring.all_gather"
KILLER = "tests.comm.test_collectives_by_hand.test_an_all_gather_puts_shards_in_rank_order_on_every_rank"
CAUSE = "wrong order"


def mutant(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    n, r = wire.size, wire.rank
    places = shards_of(full, n)
    places[0].copy_(shard)
    for step in range(1, n):
        arriving = wire.irecv(places[step], (r - 1) % n)
        wire.isend(places[step - 1], (r + 1) % n).wait()
        arriving.wait()
