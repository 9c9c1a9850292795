"""Grade an all-reduce by what it does: any algorithm that is right, and sends no more than a ring."""

import torch

from comm.algorithms import ring
from comm.collectives import all_reduce
from comm.wire.gloo_wire import peer_wire
from comm.wire.wire import Transfer, Wire
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from tests.on_ranks import on_ranks

REDUCED = {
    "sum": lambda all_rn: all_rn.sum(0),
    "mean": lambda all_rn: all_rn.mean(0),
    "max": lambda all_rn: all_rn.amax(0),
    "min": lambda all_rn: all_rn.amin(0),
    "product": lambda all_rn: all_rn.prod(0),
}


def compare(cluster: Cluster, numel: int, op: str) -> None:
    n = cluster.world_size
    all_rn = torch.randn(n, numel, generator=torch.Generator().manual_seed(0)).double()
    full = all_rn[cluster.rank].clone()
    all_reduce(full, op, pattern="ring")
    what = f"{op} of {numel} numbers on {n} ranks:"
    fits = [other for other, reduced in REDUCED.items() if torch.allclose(full, reduced(all_rn))]
    computed = op if op in fits or not fits else fits[0]
    assert computed == op, f"{what} the result is the {computed}, and not the {op}"
    assert_same({"full": full}, {"full": REDUCED[op](all_rn)}, 1e-12, what)


def test_two_ranks_have_the_sum_of_both():
    run_ranks(compare, 2, 6, "sum")


@on_ranks(1, 3, 4)
def test_all_ranks_have_the_reduction_of_all(cluster: Cluster):
    for op in REDUCED:
        for numel in (1, 2, 3 * cluster.world_size + 1):
            compare(cluster, numel, op)


class NoEmptyMessages:
    """A wire that refuses tensors without elements."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.rank, self.size = wire, wire.rank, wire.size

    def isend(self, tensor: torch.Tensor, dst: int) -> Transfer:
        assert tensor.numel(), f"wire.isend(tensor, {dst}) got a tensor without elements, which is not sent"
        return self.wire.isend(tensor, dst)

    def irecv(self, tensor: torch.Tensor, src: int) -> Transfer:
        assert tensor.numel(), f"wire.irecv(tensor, {src}) got a tensor without elements, which is not sent"
        return self.wire.irecv(tensor, src)


def test_a_tensor_without_elements_is_neither_sent_nor_received():
    run_ranks(lambda cluster: ring.all_reduce(NoEmptyMessages(peer_wire(None)), torch.ones(1), "sum"), 3)


@on_ranks(2, 3, 4)
def test_no_rank_sends_more_than_in_a_ring(cluster: Cluster):
    n, full = cluster.world_size, torch.ones(12)
    LEDGER.clear()
    all_reduce(full, pattern="ring")
    rows = LEDGER.rows().items()
    sent = sum((row for entry, row in rows if entry.pattern == "ring"), Traffic())
    messages, num_bytes = 2 * (n - 1), 2 * (n - 1) * full.nbytes // n
    assert sent.messages_sent <= messages, (
        f"your function sent {sent.messages_sent} messages on {n} ranks, and not 2(n-1) = {messages}"
    )
    assert sent.bytes_sent <= num_bytes, (
        f"your function sent {sent.bytes_sent} of {full.nbytes} bytes on {n} ranks, and not "
        f"2(n-1)/n of them = {num_bytes}"
    )
