"""The page of ring attention computes what lesson 6 computes: parts, times, and what a rank sends."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from comm.collectives import use_pattern
from comm.cost import Link
from context_parallel.clock import seconds_per_pair
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import CUTS, SequenceCut
from context_parallel.traffic import all_to_all_layer, ring_layer
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from tensor_parallel.parallelize import parallelize
from tensor_parallel.traffic import ExpectedTraffic
from tests.browser import Browser

LENGTHS = (1, 3, 12, 17, 64, 1001)
LINKS = (Link(0.0, 0.0), Link(2.0, 0.0), Link(1.0, 0.25), Link(0.0, 3.0))
BATCH, HEADS, KV_HEADS, HEAD_WIDTH, ITEMSIZE = 2, 24, 12, 5, 2


@pytest.fixture
def opened(browser: Browser, pages: Path) -> Browser:
    browser.open(pages / "context.html")
    return browser


def cut_of(name: str, length: int, ranks: int) -> str:
    return f"CUTS.{name}.of({length}, {ranks})"


def js_link(link: Link) -> str:
    return f"{{alpha: {link.alpha!r}, beta: {link.beta!r}}}"


def parts_of(cut: SequenceCut, ranks: int, is_causal: bool) -> list[Any]:
    """Return the parts of all ranks in all steps of the ring, as the page describes them."""
    return [
        [
            [
                [part.queries.start, part.queries.stop, part.keys.start, part.keys.stop, part.is_causal]
                for part in cut.parts(rank, (rank - step) % ranks, is_causal)
            ]
            for step in range(ranks)
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("name", CUTS)
def test_the_parts_and_pairs_are_those_of_the_sequence_cut(opened: Browser, name: str):
    opened.js(
        "window.allParts = (cut, isCausal) => ranksOf(cut.length).map(rank => ranksOf(cut.length)"
        ".map(step => partsOf(cut, rank, sourceOf(rank, step, cut.length), isCausal).map(part => "
        "[part.queries.start, part.queries.stop, part.keys.start, part.keys.stop, part.isCausal]))), 0"
    )
    for ranks, length, is_causal in product(range(1, 9), LENGTHS, (True, False)):
        cut, shown = CUTS[name](length, ranks), cut_of(name, length, ranks)
        causal = json.dumps(is_causal)
        assert opened.json(f"allParts({shown}, {causal})") == parts_of(cut, ranks, is_causal)
        pairs = [
            [
                sum(part.pairs for part in cut.parts(rank, (rank - step) % ranks, is_causal))
                for step in range(ranks)
            ]
            for rank in range(ranks)
        ]
        assert opened.json(f"pairsOfRanks({shown}, {causal})") == pairs
        lengths = [cut.length(rank) for rank in range(ranks)]
        assert opened.json(f"ranksOf({ranks}).map(rank => lengthOf({shown}, rank))") == lengths
        if is_causal:
            assert opened.json(f"stepPairs({shown}, true)") == step_pairs(cut)
            assert opened.json(f"balancedPairs({shown}, true)") == balanced_pairs(cut)


def test_forward_and_backward_by_formula_are_those_of_predict(opened: Browser):
    for name, ranks, length, link in product(CUTS, (1, 2, 3, 4, 8), (48, 1001), LINKS):
        pairs, per_pair, block = step_pairs(CUTS[name](length, ranks)), 0.5, 7
        found = opened.json(f"ringSeconds({pairs}, {per_pair}, {block}, {js_link(link)})")
        predicted = ring_seconds(pairs, per_pair, block, link)
        assert found["forward"] + found["backward"] == pytest.approx(predicted, rel=1e-12)
        message = link.alpha + block * link.beta if ranks > 1 else 0
        steps = [max(each * per_pair, message) for each in pairs[:-1]] + [pairs[-1] * per_pair]
        assert [each["forward"] for each in found["steps"]] == steps
        assert found["forward"] == pytest.approx(sum(steps))
        computing = 3 * per_pair * sum(pairs)  # a backward computes twice as long as its forward
        assert found["exposed"] == pytest.approx(max(0, predicted - computing), abs=1e-6)
        assert found["exposed"] + found["hidden"] == pytest.approx(3 * (ranks - 1) * message)
    for length in (1, 17, 4096):
        assert opened.json(f"secondsPerPair(0.3, {length})") == seconds_per_pair(0.3, length)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_timeline_takes_as_long_as_the_formula_or_less_where_ranks_differ(
    opened: Browser, name: str, is_causal: bool
):
    for ranks, length, link in product((2, 3, 4, 7, 8), (336, 337, 1001), LINKS):
        cut, shown = CUTS[name](length, ranks), cut_of(name, length, ranks)
        causal, per_pair = json.dumps(is_causal), 1e-3
        found = opened.json(f"timelineOf({shown}, {causal}, {per_pair}, 1, {js_link(link)})")
        block = max(map(cut.length, range(ranks)))
        pairs = opened.json(f"stepPairs({shown}, {causal})")
        formula = opened.json(f"ringSeconds({pairs}, {per_pair}, {block}, {js_link(link)}).forward")
        assert found["makespan"] <= formula * (1 + 1e-9)
        if length % (2 * ranks) == 0:
            assert found["makespan"] == pytest.approx(formula)


def sent_by_lesson(cluster: Cluster, length: int) -> dict[str, int]:
    """Return the bytes that this rank sends for one layer, without headers, by the lessons' formulas."""
    use_pattern("torch")  # it exchanges no headers
    head = BATCH * HEAD_WIDTH
    found = {}
    for name, make in CUTS.items():
        sequence = SharedSequence(None, make(length, cluster.world_size))
        ring = ring_layer(sequence, head, HEADS, KV_HEADS, ITEMSIZE)
        found[name] = sum(each.bytes_sent for each in ring)
    sequence = SharedSequence(None, SequenceCut.contiguous(length, cluster.world_size))
    exchange = all_to_all_layer(sequence, head, HEADS, KV_HEADS, ITEMSIZE)
    found["allToAll"] = sum(each.bytes_sent for each in exchange)
    config = GPTConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, width=HEADS * HEAD_WIDTH, num_layers=1)
    for overlap in (False, True):
        expected = ExpectedTraffic(parallelize(GPT(config), None, True, overlap), ITEMSIZE)
        found[f"sequence {overlap}"] = expected.of_parts((BATCH, length), {"blocks.0"}).bytes_sent
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_sends_what_the_lessons_expect(opened: Browser, ranks: int):
    head, numbers = BATCH * HEAD_WIDTH, f"{HEADS}, {KV_HEADS}, {ITEMSIZE}"
    for length in (17, 24):
        by_rank = run_ranks(sent_by_lesson, ranks, length)
        for rank, expected in enumerate(by_rank):
            for name in CUTS:
                lengths = [CUTS[name](length, ranks).length(each) for each in range(ranks)]
                sent = opened.json(f"ringBytes({lengths}, {rank}, {head}, {KV_HEADS}, {ITEMSIZE})")
                assert sent == expected[name]
            lengths = [SequenceCut.contiguous(length, ranks).length(each) for each in range(ranks)]
            sent = opened.json(f"allToAllBytes({lengths}, {rank}, {head}, {numbers})")
            assert sent == expected["allToAll"]
        sent = opened.json(f"sequenceBytes({ranks}, {length}, {head}, {HEADS}, {ITEMSIZE})")
        even = -(-length // ranks) * ranks
        assert sent == max(each["sequence False"] for each in by_rank)
        # The page says that lesson 3 sends 10 (n-1)/n T w with overlap, which is its default.
        with_overlap = 10 * (ranks - 1) * BATCH * even * HEADS * HEAD_WIDTH * ITEMSIZE // ranks
        assert with_overlap == max(each["sequence True"] for each in by_rank)


# What the page shows, when it opens and when it is used.

LENGTH, SECONDS, LINK = 32768, 20e-3, Link(20e-6, 8e-9 / 400)  # as the page opens
TOKEN_BYTES = 2 * 8 * 128 * 2


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "context.html"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def fact(browser: Browser, kind: str) -> str:
    return browser.js(f"document.querySelector('#charts .{kind}').textContent")


def rows_of(browser: Browser, table: str) -> list[list[str]]:
    cells = "[...row.cells].map(cell => cell.textContent)"
    return browser.js(f"[...document.querySelectorAll('#{table} tbody tr')].map(row => {cells})")


def said(browser: Browser, name: str) -> str:
    return browser.js(f"document.getElementById('{name}').textContent")


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_figures_that_the_page_shows_are_those_of_the_lesson(
    browser: Browser, page: Path, name: str, ranks: int
):
    browser.open(page, f"cut={name}&ranks={ranks}&rate=400")
    cut = CUTS[name](LENGTH, ranks)
    per_pair = SECONDS / (LENGTH * (LENGTH + 1) / 2)
    block = max(map(cut.length, range(ranks))) * TOKEN_BYTES
    message, pairs = LINK.alpha + LINK.beta * block, step_pairs(cut)
    forward = sum(max(each * per_pair, message) for each in pairs[:-1]) + pairs[-1] * per_pair
    balanced = balanced_pairs(cut) * per_pair
    assert fact(browser, "makespan-formula") == milliseconds(forward)
    assert fact(browser, "balanced") == milliseconds(balanced)
    assert float(fact(browser, "ratio")) == pytest.approx(forward / balanced, rel=1e-3)
    if name == "contiguous":
        assert fact(browser, "ratio-formula") == f"{(2 * ranks - 1) / ranks:.4g}"
    steps = rows_of(browser, "steps")
    assert len(steps) == ranks and steps[-1][2:] == ["no message", steps[-1][1], "computing"]
    both = ring_seconds(pairs, per_pair, block, LINK)
    ring = rows_of(browser, "techniques")[0]
    assert ring[6].removesuffix("least") == milliseconds(both)
    words = said(browser, "steps-words")
    assert f"The forward takes {milliseconds(forward)}" in words
    assert f"it takes {milliseconds(both - forward)}." in words
