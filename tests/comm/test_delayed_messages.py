"""Every pattern is right however late its messages move, and keeps a tensor as it is until it has left."""

import itertools
from collections.abc import Callable

import pytest
import torch

from comm.algorithms import hypercube, pairwise, pipelined_ring, ring, sharded_tree, star, tree
from comm.shards import shard_sizes, shards_of
from tests.comm.delayed_wire import DelayedRanks, DelayedWire
from tests.comm.segments import short_segments

ALL_REDUCES = (
    *((file, "all_reduce") for file in (star, tree, ring, pipelined_ring)),
    *((hypercube, name) for name in ("recursive_doubling", "halving_doubling")),
)
NUMEL, ROOT = 21, 1
SEEDS = range(4)
in_short_segments = short_segments(32)  # of 4 numbers


def inputs(n: int) -> list[torch.Tensor]:
    """Return the tensor of each rank: a digit of a number for each, so a sum shows whose terms it has."""
    return [(torch.arange(NUMEL) % 3 + 1) * 10**rank for rank in range(n)]


def check(n: int, seed: int, what: str, work: Callable[[DelayedWire, list[torch.Tensor]], object]) -> None:
    """Run `work` on n ranks. It returns pairs (got, expected)."""

    def on_a_rank(wire: DelayedWire) -> None:
        for got, expected in work(wire, inputs(n)):
            assert torch.equal(got, expected), f"{what}, rank {wire.rank} of {n}: {got}, not {expected}"

    DelayedRanks(n, seed).run(on_a_rank)


@in_short_segments
def test_an_all_reduce_does_not_change_what_is_still_being_sent():
    for (file, name), n, seed in itertools.product(ALL_REDUCES, (2, 3, 4, 5), SEEDS):

        def work(wire, of_ranks, file=file, name=name):
            full = of_ranks[wire.rank]
            getattr(file, name)(wire, full, "sum")
            return [(full, sum(inputs(wire.size)))]

        check(n, seed, f"{name} of {file.__name__}", work)


@in_short_segments
@pytest.mark.parametrize("file", [ring, pipelined_ring, sharded_tree])
def test_the_halves_of_an_all_reduce_do_not_change_what_is_still_being_sent(file):
    def work(wire, of_ranks):
        own, expected = of_ranks[wire.rank], shards_of(sum(of_ranks), wire.size)[wire.rank]
        shard, full = torch.empty_like(expected), torch.empty_like(own)
        file.reduce_scatter(wire, shard, own, "sum")
        file.all_gather(wire, full, shard)
        return [(shard, expected), (own, inputs(wire.size)[wire.rank]), (full, sum(of_ranks))]

    for n, seed in itertools.product((2, 3, 4, 5), SEEDS):
        check(n, seed, file.__name__, work)


@in_short_segments
@pytest.mark.parametrize("file", [star, tree])
def test_what_a_root_sends_or_gets_does_not_depend_on_when_messages_move(file):
    of_shards = sharded_tree if file is tree else file

    def work(wire, of_ranks):
        n, rank = wire.size, wire.rank
        copied, reduced = of_ranks[rank].clone(), of_ranks[rank].clone()
        file.broadcast(wire, copied, ROOT)
        file.reduce(wire, reduced, "sum", ROOT)
        shard = torch.empty(shard_sizes(NUMEL, n)[rank], dtype=torch.int64)
        root_only, numel = (lambda x: x if rank == ROOT else None), (NUMEL,) if file is tree else ()
        of_shards.scatter(wire, shard, root_only(of_ranks[ROOT].clone()), ROOT, *numel)
        gathered = torch.empty(NUMEL, dtype=torch.int64)
        of_shards.gather(wire, root_only(gathered), shard, ROOT, *numel)
        pairs = [(copied, of_ranks[ROOT]), (shard, shards_of(of_ranks[ROOT], n)[rank])]
        return pairs + ([(reduced, sum(of_ranks)), (gathered, of_ranks[ROOT])] if rank == ROOT else [])

    for n, seed in itertools.product((2, 3, 4, 5), SEEDS):
        check(n, seed, file.__name__, work)


@in_short_segments
def test_an_all_to_all_does_not_depend_on_when_messages_move():
    def work(wire, of_ranks):
        n, output = wire.size, torch.empty_like(of_ranks[0][: NUMEL // wire.size * wire.size])
        sizes = [NUMEL // n] * n
        pairwise.all_to_all(wire, output, of_ranks[wire.rank][: len(output)], sizes, sizes)
        return [(output, torch.cat([x[: len(output)].view(n, -1)[wire.rank] for x in of_ranks]))]

    for n, seed in itertools.product((2, 3, 4, 5), SEEDS):
        check(n, seed, "pairwise", work)
