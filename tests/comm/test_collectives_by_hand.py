"""Compare collectives with results that a reader can compute by hand."""

import torch

from comm import collectives
from comm.algorithms import ring, sharded_tree, tree
from comm.collectives import PATTERNS
from comm.patterns import ALGORITHMS
from comm.wire.gloo_wire import peer_wire
from lab.check import assert_same
from lab.ranks import run_ranks
from tests.comm.helpers import short_segments
from tests.on_ranks import on_ranks


def test_a_ring_all_reduce_adds_up_all_ranks_in_every_chunk():
    def add_up(cluster) -> list[float]:
        mine = torch.arange(8.0) + 10.0 ** (2 + cluster.rank)  # each element tells whom it has met
        collectives.all_reduce(mine, pattern="pipelined_ring")
        return mine.tolist()

    for n in (2, 4):
        everyone = sum(10.0 ** (2 + rank) for rank in range(n))
        assert run_ranks(add_up, n) == [[n * i + everyone for i in range(8)]] * n


def test_a_mean_is_divided_by_the_number_of_ranks_once():
    def average(cluster) -> list[float]:
        results = []
        for pattern in PATTERNS["all_reduce"]:
            mine = torch.full((6,), float(cluster.rank))
            collectives.all_reduce(mine, "mean", pattern=pattern)
            results.append(mine)
        shard = torch.empty(2)
        collectives.reduce_scatter(shard, torch.full((6,), float(cluster.rank)), "mean")
        return torch.cat([*results, shard]).tolist()

    for got in run_ranks(average, 3):
        assert got == [1.0] * (6 * len(PATTERNS["all_reduce"]) + 2)


def test_a_reduce_scatter_gives_each_rank_its_own_shard():
    def own(cluster) -> list[float]:
        shard = torch.empty(3)
        collectives.reduce_scatter(shard, torch.arange(12.0))
        return shard.tolist()

    assert run_ranks(own, 4) == [[4.0 * (3 * rank + i) for i in range(3)] for rank in range(4)]


def test_an_all_gather_puts_shards_in_rank_order_on_every_rank():
    def collect(cluster) -> list[float]:
        whole = torch.empty(8)
        collectives.all_gather(whole, torch.tensor([1.0, 2.0]) + 10 * cluster.rank)
        return whole.tolist()

    assert run_ranks(collect, 4) == [[1.0, 2.0, 11.0, 12.0, 21.0, 22.0, 31.0, 32.0]] * 4


def test_a_tree_broadcasts_from_every_root():
    def spread(cluster) -> list[float]:
        got = []
        for root in range(cluster.world_size):
            mine = torch.tensor([float(cluster.rank)])
            collectives.broadcast(mine, root, pattern="tree")
            got.append(mine.item())
        return got

    assert run_ranks(spread, 5) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 5


def test_a_tree_sends_to_the_largest_subtree_first_and_to_one_child_at_a_time():
    events = []

    class Noting:
        """A wire, and the transfers of it, of the root of eight ranks."""

        rank, size = 0, 8

        def isend(self, tensor: torch.Tensor, peer: int) -> "Noting":
            events.append(f"send to {peer}")
            return self

        def wait(self) -> None:
            events.append("wait")

    tree.broadcast(Noting(), torch.ones(1), 0)
    assert events == ["send to 4", "wait", "send to 2", "wait", "send to 1", "wait"]


@on_ranks(4)
def test_a_tree_scatters_to_each_rank_its_own_shard_from_every_root(cluster):
    shards = [torch.tensor(numbers) for numbers in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0])]
    for root in range(cluster.world_size):
        own = torch.empty_like(shards[cluster.rank])
        full = torch.cat(shards) if cluster.rank == root else None
        sharded_tree.scatter(peer_wire(None), own, full, root, numel=7)
        name = f"shard {cluster.rank}"
        assert_same({name: own}, {name: shards[cluster.rank]}, 0, f"after a scatter from rank {root},")


def test_a_ring_starts_no_message_for_an_empty_tensor():
    events = []

    class Noting:
        """A wire, and the transfers of it, of rank 1 of four."""

        rank, size = 1, 4

        def isend(self, tensor: torch.Tensor, peer: int) -> "Noting":
            events.append(f"send {tensor.numel()} to {peer}")
            return self

        def irecv(self, tensor: torch.Tensor, peer: int) -> "Noting":
            events.append(f"receive {tensor.numel()} from {peer}")
            return self

        def wait(self) -> None:
            events.append("wait")

    sending, receiving = ["send 3 to 2", "wait"], ["receive 2 from 0", "wait"]
    for outgoing, incoming, expected in ((0, 0, []), (3, 0, sending), (0, 2, receiving)):
        events.clear()
        ring.shift(Noting(), torch.ones(outgoing), torch.ones(incoming))
        what = (
            f"{outgoing} elements leave and {incoming} arrive: an empty tensor is neither sent nor received"
        )
        assert events == expected, f"{what}; expected {expected}, got {events}"


class LateTransfer:
    """A message that moves as late as it may: when it is waited for."""

    def __init__(self, wire: "LateWire", tensor: torch.Tensor, before: torch.Tensor | None) -> None:
        self._wire, self.tensor, self._before = wire, tensor, before
        wire.unfinished.append(self)

    def wait(self) -> None:
        if self not in self._wire.unfinished:
            return
        self._wire.unfinished.remove(self)
        if self._before is None:
            self.tensor.fill_(7)
        else:
            is_kept = torch.equal(self.tensor, self._before)
            assert is_kept, f"rank {self._wire.rank} has changed a tensor before its send had ended"


class LateWire:
    """The wire of one rank. What arrives does not matter, only what happens to a tensor that leaves."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.unfinished = rank, size, []

    def isend(self, tensor: torch.Tensor, dst: int) -> LateTransfer:
        return LateTransfer(self, tensor, tensor.clone())

    def irecv(self, tensor: torch.Tensor, src: int) -> LateTransfer:
        return LateTransfer(self, tensor, None)


def test_an_all_reduce_does_not_change_what_is_still_being_sent():
    with short_segments(32):  # of 4 numbers
        for name, all_reduce in ALGORITHMS["all_reduce"].items():
            for n in (2, 3, 4, 5) if name != "hierarchical" else ():
                for rank in range(n):
                    wire = LateWire(rank, n)
                    all_reduce(wire, torch.arange(21), "sum")
                    assert not wire.unfinished, f"{name}: rank {rank} of {n} has not waited for a message"


def test_a_reduce_does_not_change_the_other_ranks_tensors():
    def lend(cluster) -> list[float]:
        got = []
        for pattern in ("tree", "flat", "torch"):
            for root in range(cluster.world_size):
                mine = torch.tensor([10.0**cluster.rank])
                collectives.reduce(mine, root=root, pattern=pattern)
                got.append(mine.item())
        return got

    for rank, got in enumerate(run_ranks(lend, 4)):
        assert got == [1111.0 if root == rank else 10.0**rank for root in range(4)] * 3


def test_an_all_to_all_sends_each_rank_its_part_of_any_size():
    sizes = [[(p + 2 * q) % 4 for q in range(3)] for p in range(3)]  # what rank p sends to rank q

    def exchange(cluster) -> list[float]:
        n, r = cluster.world_size, cluster.rank
        full = torch.cat([torch.full((sizes[r][q],), 10.0 * r + q) for q in range(n)])
        received = [sizes[p][r] for p in range(n)]
        output = torch.empty(sum(received))
        collectives.all_to_all(output, full, received, sizes[r])
        return output.tolist()

    for rank, got in enumerate(run_ranks(exchange, 3)):
        assert got == [10.0 * p + rank for p in range(3) for _ in range(sizes[p][rank])]
