"""The README of comm names every file, and its formulas are those of cost.py."""

import re
from pathlib import Path

import pytest

from comm import cost
from comm.collectives import PATTERNS
from comm.cost import Link

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
