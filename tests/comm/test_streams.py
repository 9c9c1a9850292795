"""Every pattern works over every transport, and a stranger, a death or a full machine ends in a sentence."""

import itertools

import pytest
import torch

from comm import collectives, cost
from comm.collectives import PATTERNS, all_reduce, barrier, broadcast
from comm.transport import segment, streams
from comm.transport.choice import CAN_POLL
from comm.transport.memory_ends import MemoryIn, MemoryOut
from comm.transport.stream_ends import StreamIn, StreamOut
from comm.wire.wire import group_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.collective_cases import (
    DTYPES,
    LAYOUTS,
    REDUCTIONS,
    ROOTED,
    WORLD_SIZES,
    Case,
    run_cases,
)
from tests.comm.mismatches import error_text, works
from tests.comm.segments import short_segments
from tests.comm.transports import over

pytestmark = pytest.mark.skipif(not CAN_POLL, reason="the transports poll sockets")

OURS = [(op, pattern) for op, patterns in PATTERNS.items() for pattern in patterns]
CALLS = [(op, pattern) for op, pattern in OURS if op != "barrier"]


def ends(transport: str) -> tuple[set[type], set[type]]:
    """Return the kinds of this rank's connections, to its peers and from them."""
    peers = streams._streams[group_of(None)][transport, False]._all
    return {type(peer.out) for peer in peers}, {type(peer.incoming) for peer in peers}


@pytest.mark.parametrize("transport", ["sockets", "tcp", "gloo"])  # the other tests use "auto": shared memory
@pytest.mark.parametrize("n", WORLD_SIZES[1:])
def test_every_pattern_equals_the_reference_over_every_transport(transport: str, n: int):
    dtypes, layouts, reductions = map(itertools.cycle, (DTYPES, LAYOUTS, REDUCTIONS))
    cases = [
        Case(op, pattern, numel, next(dtypes), next(reductions), seed % n, next(layouts), seed)
        for seed, (op, pattern) in enumerate(CALLS)
        for numel in (0, 1, n + 1, 101)
    ]
    with short_segments(32):
        assert min(run_ranks(lambda cluster: over(transport, cluster, run_cases, cases), n)) > 0.8 * len(
            cases
        )


def test_messages_travel_as_the_transport_says():
    def kinds(cluster) -> list[tuple]:
        found = []
        for transport in ("auto", "shared_memory", "sockets"):
            over(transport, cluster, lambda _: all_reduce(torch.ones(1000), pattern="ring"))
            found.append(ends(transport))
        over("gloo", cluster, lambda _: all_reduce(torch.ones(1000), pattern="ring"))
        assert ("gloo", False) not in streams._streams[group_of(None)]
        return found

    memory = ({MemoryOut}, {MemoryIn}) if segment.is_possible() else ({StreamOut}, {StreamIn})
    assert run_ranks(kinds, 3) == [[memory, memory, ({StreamOut}, {StreamIn})]] * 3


@pytest.mark.parametrize("transport", ["auto", "sockets"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_counted_traffic_equals_the_formula_over_every_transport(transport: str, n: int):
    def count(cluster) -> None:
        for op, pattern in OURS:
            if op in ROOTED or op == "all_to_all":
                continue
            LEDGER.clear()
            x = torch.ones(101)
            shard = torch.ones(len(torch.tensor_split(x, n)[cluster.rank]))
            match op:
                case "all_gather":
                    collectives.all_gather(x, shard, pattern=pattern)
                case "reduce_scatter":
                    collectives.reduce_scatter(shard, x, pattern=pattern)
                case "all_reduce":
                    all_reduce(x, pattern=pattern)
                case "barrier":
                    barrier(pattern=pattern)
            expected = {
                Entry(op, pattern): cost.traffic(op, pattern, 101, 4, n, cluster.rank),
                Entry(op, "header"): cost.header_traffic(n),
            }
            assert LEDGER.rows() == {entry: sent for entry, sent in expected.items() if sent != Traffic()}

    with short_segments(16):
        run_ranks(lambda cluster: over(transport, cluster, count), n)


@pytest.mark.parametrize("transport", ["sockets", "gloo"])
def test_calls_that_do_not_fit_end_in_the_same_sentence_over_every_transport(transport: str):
    def differ(cluster) -> list[str]:
        odd, texts = cluster.rank == 1, []
        calls = [
            lambda: all_reduce(torch.ones(5 + odd)),
            lambda: all_reduce(torch.ones(5_000_000 + odd), pattern="recursive_doubling"),
            lambda: all_reduce(torch.ones(5, dtype=torch.int32 if odd else torch.float32)),
            lambda: broadcast(torch.ones(5), root=int(odd)),
            lambda: all_reduce(torch.ones(5), pattern="tree" if odd else "ring"),
            lambda: barrier() if odd else all_reduce(torch.ones(6)),
            lambda: collectives.gather(torch.ones(2 + odd), torch.ones(8) if cluster.is_main else None),
            lambda: collectives.all_to_all(
                torch.ones(4), torch.ones(4 + odd), [1, 1, 1, 1], [1, 1, 1, 1 + odd]
            ),
        ]
        for call in calls:
            texts.append(error_text(call))
            assert works()
        return texts

    first, *others = run_ranks(lambda cluster: over(transport, cluster, differ), 4, group_timeout=20)
    assert all(first) and others == [first] * 3
