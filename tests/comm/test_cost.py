"""The traffic that the ledger counts equals the formula exactly, which equals sums done by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from comm import collectives, cost
from comm.collectives import PATTERNS
from comm.cost import Link
from comm.shards import segments_of, shard_sizes
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.collective_cases import ROOTED
from tests.comm.helpers import short_segments
from tests.on_ranks import on_ranks

DTYPES = (torch.float32, torch.float64, torch.uint8, torch.bfloat16)
OURS = [(op, pattern) for op, patterns in PATTERNS.items() for pattern in patterns]


# the formulas of the exercise predicted_seconds; test_narrated.py and test_hierarchical.py have the others
OF_THE_EXERCISE = [(op, pattern) for op, pattern in OURS if pattern not in ("bruck", "hierarchical")]


def call(op: str, pattern: str, numel: int, dtype: torch.dtype, n: int, rank: int, root: int) -> None:
    """Call one collective on a full tensor of `numel` elements."""
    whole = torch.ones(numel, dtype=dtype)
    shard = torch.ones_like(torch.tensor_split(whole, n)[rank])
    at_root, even = whole if rank == root else None, whole[: numel // n * n]
    tensors: dict[str, tuple[Any, ...]] = {
        "barrier": (),
        "broadcast": (whole, root),
        "reduce": (whole, "sum", root),
        "all_reduce": (whole,),
        "scatter": (shard, at_root, root),
        "gather": (shard, at_root, root),
        "all_gather": (whole, shard),
        "reduce_scatter": (shard, whole),
        "all_to_all": (
            torch.empty_like(even),
            even,
        ),  # what rank p sends to q is as long as what q sends to p
    }
    getattr(collectives, op)(*tensors[op], pattern=pattern)


def sent_otherwise(got: dict[Entry, Traffic], expected: dict[Entry, Traffic], rank: int) -> str:
    """Return how the traffic of a rank differs from what is expected, for the first pattern that differs."""
    for entry in got | expected:
        one, other = got.get(entry, Traffic()), expected.get(entry, Traffic())
        if one != other:
            empty = ". An empty tensor must not be sent" if one.bytes_sent == other.bytes_sent else ""
            return f"rank {rank} sends {shown(one)} ({entry.pattern}), expected {shown(other)}{empty}"
    return ""


def shown(traffic: Traffic) -> str:
    return f"{traffic.bytes_sent} bytes in {traffic.messages_sent} messages"


def counted_beside_formula(cluster) -> int:
    n, r, checked = cluster.world_size, cluster.rank, 0
    for op, pattern in OURS:
        for place, numel in enumerate((0, 1, 3, 2 * n + 1, 101)):
            if op == "all_to_all":
                numel = numel // n * n
            root = place % n if op in ROOTED else 0
            dtype = DTYPES[place % len(DTYPES)]
            LEDGER.clear()
            call(op, pattern, numel, dtype, n, r, root)
            expected = {
                Entry(op, pattern): cost.traffic(op, pattern, numel, dtype.itemsize, n, r, root),
                Entry(op, "header"): cost.header_traffic(n),
            }
            expected = {entry: traffic for entry, traffic in expected.items() if traffic != Traffic()}
            got = LEDGER.rows()
            what = f"{op} with {pattern}, {numel} elements of {dtype}, root {root}, {n} ranks"
            assert got == expected, f"{what}: {sent_otherwise(got, expected, r)}"
            assert LEDGER.total() == expected.get(Entry(op, pattern), Traffic())
            checked += 1
    return checked


@pytest.mark.parametrize("n", [3, 4])
def test_counted_traffic_equals_the_formula_exactly(n: int):
    with short_segments(16):  # 101 elements are many messages
        assert min(run_ranks(counted_beside_formula, n)) == 5 * len(OURS)


@on_ranks(5)
def test_an_uneven_all_to_all_is_counted_exactly(cluster):
    n, r = cluster.world_size, cluster.rank
    sizes = [[(p * q) % 4 for q in range(n)] for p in range(n)]  # with some zeros
    outgoing = torch.ones(sum(sizes[r]))
    incoming = torch.empty(sum(sizes[p][r] for p in range(n)))
    LEDGER.clear()
    collectives.all_to_all(incoming, outgoing, [sizes[p][r] for p in range(n)], sizes[r])
    others = [sizes[r][p] for p in range(n) if p != r]
    expected = Traffic(4 * sum(others), sum(size > 0 for size in others))
    assert LEDGER.rows().get(Entry("all_to_all", "pairwise"), Traffic()) == expected
    assert cost.pairwise_traffic(sizes[r], 4, r) == expected
    assert LEDGER.rows()[Entry("all_to_all", "header")] == cost.header_traffic(n, uneven_parts=True)


@on_ranks(3)
def test_torchs_own_traffic_is_by_formula_and_never_counted(cluster):
    n, r = cluster.world_size, cluster.rank
    for op in PATTERNS:
        root = 1 if op in ROOTED else 0
        LEDGER.clear()
        call(op, "torch", 6, torch.float32, n, r, root)
        expected = cost.traffic(op, "torch", 6, 4, n, r, root)
        by_formula = LEDGER.rows().get(Entry(op, "torch", by_formula=True), Traffic())
        assert by_formula == expected, op
        assert all(entry.by_formula for entry in LEDGER.rows()), op


def test_predicted_seconds_follow_alpha_and_beta():
    a, b = 1e-3, 1200e-6  # a millisecond for each message; 1200 bytes, and a microsecond for each
    header = 2 * a  # two rounds among four ranks
    four_ranks = {
        ("barrier", "tree"): header,
        ("broadcast", "tree"): header + 2 * (a + b),
        ("broadcast", "flat"): header + a + 3 * b,
        ("reduce", "tree"): header + 2 * (a + b),
        ("reduce", "flat"): header + a + 3 * b,
        ("scatter", "flat"): header + a + 3 / 4 * b,
        ("gather", "flat"): header + a + 3 / 4 * b,
        ("all_gather", "tree"): header + 2 * a + 3 / 4 * b + 2 * (a + b),
        ("reduce_scatter", "tree"): header + 2 * (a + b) + 2 * a + 3 / 4 * b,
        ("all_gather", "ring"): header + 3 * (a + b / 4),
        ("reduce_scatter", "pipelined_ring"): header + 3 * (a + b / 4),
        ("all_reduce", "ring"): header + 6 * (a + b / 4),
        ("all_reduce", "tree"): header + 4 * (a + b),
        ("all_reduce", "flat"): header + 2 * (a + 3 * b),
        ("all_reduce", "recursive_doubling"): header + 2 * (a + b),
        ("all_reduce", "halving_doubling"): header + 4 * a + 2 * 3 / 4 * b,
        ("all_to_all", "pairwise"): header + 3 * a + 3 / 4 * b,
    }
    five_ranks = {  # the fifth one gives its tensor to another first, and gets the result at the end
        ("all_reduce", "recursive_doubling"): 3 * a + 4 * (a + b),
        ("all_reduce", "halving_doubling"): 3 * a + 4 * a + 2 * 3 / 4 * b + 2 * (a + b),
    }
    for ranks, expected in ((4, four_ranks), (5, five_ranks), (1, dict.fromkeys(OF_THE_EXERCISE, 0.0))):
        for (op, pattern), seconds in expected.items():
            got = cost.seconds(op, pattern, 1200, ranks, Link(alpha=1e-3, beta=1e-6))
            case = f"{op} with {pattern}, {ranks} ranks, 1200 bytes, alpha 1 ms, beta 1 us"
            told = f"{case}: expected {seconds:.6f} s, got {got:.6f} s"
            assert got == pytest.approx(seconds), told
    assert all(cost.seconds(*each, 1200, 4, Link(alpha=1e-3, beta=1e-6)) > 0 for each in OF_THE_EXERCISE)


def test_an_unknown_pattern_has_no_formula():
    with pytest.raises(ValueError, match="no formula for all_reduce with pattern 'zigzag'"):
        cost.seconds("all_reduce", "zigzag", 8, 2, Link(0.0, 0.0))
    with pytest.raises(ValueError, match="no formula for broadcast with pattern 'pipelined_ring'"):
        cost.traffic("broadcast", "pipelined_ring", 8, 4, 2, 0)


def test_a_tensor_is_divided_as_by_tensor_split_and_its_segments_cover_it():
    for numel in (0, 1, 2, 3, 7, 8, 100):
        for n in (1, 2, 3, 4, 5, 7):
            pieces = torch.tensor_split(torch.arange(numel), n)
            assert shard_sizes(numel, n) == [len(piece) for piece in pieces]
    with short_segments(16):
        for numel in (0, 1, 4, 5, 9):
            pieces = segments_of(torch.arange(numel, dtype=torch.float32))
            assert [len(piece) for piece in pieces] == [4] * (numel // 4) + [numel % 4] * (numel % 4 > 0)


COMM = Path(cost.__file__).parent
README = (COMM / "README.md").read_text()
RING = ("pipelined_ring",)  # as ring, in segments
IF_POWER_OF_TWO = (("reduce_scatter", "tree"),)  # bytes, as the README says
ALL_IF_POWER_OF_TWO = ("recursive_doubling", "halving_doubling", ("all_to_all", "bruck"))
LINK = Link(alpha=3e-5, beta=1e-9)
ROWS = [
    (op, pattern, formulas)
    for op, pattern, *formulas in re.findall(
        r"^\| (\w+) \| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", README, flags=re.MULTILINE
    )
]


def value(formula: str, n: int, num_bytes: int, h: int = 1) -> float:
    """Return what a formula such as "2 (n-1)/n B" comes to, on h hosts."""
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula)
    names = {"n": n, "L": (n - 1).bit_length(), "B": num_bytes, "alpha": LINK.alpha, "beta": LINK.beta}
    names |= {"h": h, "m": n // h, "A": LINK.alpha, "b": LINK.beta}
    return eval(product, {"__builtins__": {}}, names)


def test_the_table_has_every_operation_and_pattern_once():
    ours = [(op, pattern) for op, patterns in PATTERNS.items() for pattern in patterns if op != "barrier"]
    assert sorted((op, pattern) for op, pattern, _ in ROWS) == sorted(
        (op, pattern) for op, pattern in ours if pattern not in RING
    )


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_the_tables_formulas_are_those_of_cost(n: int):
    numel = 8 * 3 * 7 * 4
    for op, pattern, (messages, num_bytes, seconds) in ROWS:
        if n & (n - 1) and (pattern in ALL_IF_POWER_OF_TWO or (op, pattern) in ALL_IF_POWER_OF_TWO):
            continue  # the table says that they are for powers of two
        all_ranks = [cost.traffic(op, pattern, numel, 4, n, rank) for rank in range(n)]
        assert value(messages, n, 4 * numel) == max(traffic.messages_sent for traffic in all_ranks), op
        if (op, pattern) not in IF_POWER_OF_TWO or not n & (n - 1):
            assert value(num_bytes, n, 4 * numel) == max(traffic.bytes_sent for traffic in all_ranks), op
        headers = (n - 1).bit_length() * LINK.alpha
        predicted = cost.seconds(op, pattern, 4 * numel, n, LINK) - headers
        assert value(seconds, n, 4 * numel) == pytest.approx(predicted, rel=1e-9), (op, pattern)
        for segmented in RING if pattern == "ring" else ():
            in_segments = [cost.traffic(op, segmented, numel, 4, n, rank) for rank in range(n)]
            assert [one.bytes_sent for one in in_segments] == [one.bytes_sent for one in all_ranks]


@pytest.mark.parametrize(("h", "m"), [(1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_the_formulas_of_hierarchical_are_those_of_cost_on_any_number_of_hosts(h: int, m: int):
    n, numel, hosts = h * m, 8 * 3 * 5 * 7, [rank // m for rank in range(h * m)]
    (messages, num_bytes, _), *_ = [formulas for _, name, formulas in ROWS if name == "hierarchical"]
    for rank in range(n):
        sent = cost.traffic("all_reduce", "hierarchical", numel, 4, n, rank, hosts=hosts)
        assert value(messages, n, 4 * numel, h) == sent.messages_sent
        assert value(num_bytes, n, 4 * numel, h) == sent.bytes_sent
