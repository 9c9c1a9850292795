"""The page of ring attention computes what lesson 6 computes: parts, times, and what a rank sends."""

import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from comm import cost
from comm.collectives import use_pattern
from comm.cost import Link
from context_parallel.clock import seconds_per_pair
from context_parallel.cost import all_to_all_layer, ring_layer
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import CUTS, SequenceCut
from lab.cluster import Cluster
from lab.models.model import GPTConfig
from lab.ranks import run_ranks
from tensor_parallel.expected_traffic import ExpectedTraffic
from tests.browser import Browser

LENGTHS = (1, 3, 12, 17, 64, 1001)
LINKS = (Link(0.0, 0.0), Link(2.0, 0.0), Link(1.0, 0.25), Link(0.0, 3.0))
BATCH, HEADS, KV_HEADS, HEAD_WIDTH, ITEMSIZE = 2, 24, 12, 5, 2


@pytest.fixture
def opened(browser: Browser, pages: Path) -> Browser:
    browser.open(pages / "context.html")
    return browser


def js(browser: Browser, expression: str) -> Any:
    return json.loads(browser.js(f"JSON.stringify({expression})"))


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
        assert js(opened, f"allParts({shown}, {causal})") == parts_of(cut, ranks, is_causal)
        pairs = [
            [
                sum(part.pairs for part in cut.parts(rank, (rank - step) % ranks, is_causal))
                for step in range(ranks)
            ]
            for rank in range(ranks)
        ]
        assert js(opened, f"pairsOfRanks({shown}, {causal})") == pairs
        lengths = [cut.length(rank) for rank in range(ranks)]
        assert js(opened, f"ranksOf({ranks}).map(rank => lengthOf({shown}, rank))") == lengths
        if is_causal:
            assert js(opened, f"stepPairs({shown}, true)") == step_pairs(cut)
            assert js(opened, f"balancedPairs({shown}, true)") == balanced_pairs(cut)


@pytest.mark.parametrize("name", CUTS)
def test_rows_and_columns_are_the_positions_of_the_parts_in_the_sequence(opened: Browser, name: str):
    for ranks, length in product((2, 3, 8), (17, 64)):
        cut = CUTS[name](length, ranks)
        rows = js(opened, f"timelineOf({cut_of(name, length, ranks)}, true, 1, 1, {js_link(LINKS[0])}).rows")
        for rank, step in product(range(ranks), range(ranks)):
            for part in rows[rank][step]["parts"]:
                source = rows[rank][step]["source"]
                for of_rank, own, place in ((rank, "queries", "rows"), (source, "keys", "columns")):
                    positions = cut.positions(of_rank)[slice(*part[own].values())].tolist()
                    assert positions == list(range(*part[place].values()))


def test_forward_and_backward_by_formula_are_those_of_predict(opened: Browser):
    for name, ranks, length, link in product(CUTS, (1, 2, 3, 4, 8), (48, 1001), LINKS):
        pairs, per_pair, block = step_pairs(CUTS[name](length, ranks)), 0.5, 7
        found = js(opened, f"ringSeconds({pairs}, {per_pair}, {block}, {js_link(link)})")
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
        assert js(opened, f"secondsPerPair(0.3, {length})") == seconds_per_pair(0.3, length)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_timeline_takes_as_long_as_the_formula_or_less_where_ranks_differ(
    opened: Browser, name: str, is_causal: bool
):
    for ranks, length, link in product((2, 3, 4, 7, 8), (336, 337, 1001), LINKS):
        cut, shown = CUTS[name](length, ranks), cut_of(name, length, ranks)
        causal, per_pair = json.dumps(is_causal), 1e-3
        found = js(opened, f"timelineOf({shown}, {causal}, {per_pair}, 1, {js_link(link)})")
        block = max(map(cut.length, range(ranks)))
        pairs = js(opened, f"stepPairs({shown}, {causal})")
        formula = js(opened, f"ringSeconds({pairs}, {per_pair}, {block}, {js_link(link)}).forward")
        assert found["makespan"] <= formula * (1 + 1e-9)
        if length % (2 * ranks) == 0:
            assert found["makespan"] == pytest.approx(formula)
        check_order(found["rows"], found["messages"], cut, link, per_pair, is_causal)


def check_order(
    rows: list[Any], messages: list[Any], cut: SequenceCut, link: Link, per_pair: float, is_causal: bool
) -> None:
    """Check that each rank computes its pairs, and goes on when its keys have come and its own have gone."""
    n = len(rows)
    by_step = {(each["from"], each["step"]): each for each in messages}
    assert len(by_step) == len(messages) == n * (n - 1)
    for rank, row in enumerate(rows):
        assert [step["source"] for step in row] == [(rank - step) % n for step in range(n)]
        for step in row:
            pairs = sum(part.pairs for part in cut.parts(rank, step["source"], is_causal))
            assert step["computed"] - step["begin"] == pytest.approx(pairs * per_pair)
        for i, (now, later) in enumerate(pairwise(row)):
            sent, received = by_step[rank, i], by_step[(rank - 1) % n, i]
            assert sent["to"] == (rank + 1) % n and sent["source"] == now["source"]
            assert sent["bytes"] == cut.length(now["source"]) and received["source"] == later["source"]
            assert sent["leaves"] == max(now["begin"], rows[sent["to"]][i]["begin"])
            takes = link.alpha + link.beta * sent["bytes"]
            assert sent["arrives"] - sent["leaves"] == pytest.approx(takes)
            ends = (now["computed"], sent["arrives"], received["arrives"])
            assert later["begin"] == now["end"] == max(ends)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_busiest_rank_computes_as_much_longer_as_the_formula_says(opened: Browser, ranks: int):
    length = 1680 * 100
    for name, is_causal in product(CUTS, (True, False)):
        shown, causal = cut_of(name, length, ranks), json.dumps(is_causal)
        total, balanced = js(opened, f"[sum(stepPairs({shown}, {causal})), balancedPairs({shown}, {causal})]")
        words, ratio = js(opened, f"imbalance('{name}', {causal}, {ranks})")
        assert total / balanced == pytest.approx(ratio, rel=1e-4)
        expected = (2 * ranks - 1) / ranks if name == "contiguous" and is_causal else 1
        assert (words, ratio) == ("1" if expected == 1 else "(2n-1)/n", expected)


def sent_by_lesson(cluster: Cluster, length: int) -> dict[str, int]:
    """Return the bytes that this rank sends for one layer, without headers, by the lessons' formulas."""
    use_pattern("torch")  # it exchanges no headers
    head = BATCH * HEAD_WIDTH
    found = {}
    for name, make in CUTS.items():
        ring = ring_layer(SharedSequence(None, make(length, cluster.world_size)), head, KV_HEADS, ITEMSIZE)
        found[name] = sum(each.bytes_sent for each in ring)
    sequence = SharedSequence(None, SequenceCut.contiguous(length, cluster.world_size))
    exchange = all_to_all_layer(sequence, head, HEADS, KV_HEADS, ITEMSIZE)
    found["allToAll"] = sum(each.bytes_sent for each in exchange)
    config = GPTConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, width=HEADS * HEAD_WIDTH, num_layers=1)
    for overlap in (False, True):
        expected = ExpectedTraffic(config, None, True, overlap, ITEMSIZE, ITEMSIZE)
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
                sent = js(opened, f"ringBytes({lengths}, {rank}, {head}, {KV_HEADS}, {ITEMSIZE})")
                assert sent == expected[name]
            lengths = [SequenceCut.contiguous(length, ranks).length(each) for each in range(ranks)]
            sent = js(opened, f"allToAllBytes({lengths}, {rank}, {head}, {numbers})")
            assert sent == expected["allToAll"]
        sent = js(opened, f"sequenceBytes({ranks}, {length}, {head}, {HEADS}, {ITEMSIZE})")
        even = -(-length // ranks) * ranks
        assert sent == max(each["sequence False"] for each in by_rank)
        # The page says that lesson 3 sends 10 (n-1)/n T w with overlap, which is its default.
        with_overlap = 10 * (ranks - 1) * BATCH * even * HEADS * HEAD_WIDTH * ITEMSIZE // ranks
        assert with_overlap == max(each["sequence True"] for each in by_rank)


def test_the_bytes_are_those_of_the_closed_formulas_where_the_ranks_divide_the_length(opened: Browser):
    w, kv, head = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH, BATCH * HEAD_WIDTH
    for n in (2, 3, 4, 6):
        length = 48
        tokens, lengths = BATCH * length, [length // n] * n
        found = js(
            opened,
            f"[ringBytes({lengths}, 0, {head}, {KV_HEADS}, {ITEMSIZE}), allToAllBytes({lengths}, 0, {head}, "
            f"{HEADS}, {KV_HEADS}, {ITEMSIZE}), sequenceBytes({n}, {length}, {head}, {HEADS}, {ITEMSIZE})]",
        )
        numbers = [
            6 * (n - 1) / n * tokens * kv,
            4 * (n - 1) / n**2 * tokens * (w + kv),
            8 * (n - 1) / n * tokens * w,
        ]
        assert found == pytest.approx([ITEMSIZE * each for each in numbers])


def test_collectives_take_the_seconds_of_the_cost_formulas(opened: Browser):
    link = Link(20e-6, 1e-9)
    for n in (2, 3, 4, 8):
        q, kv = 24_000 * n, 6_000 * n  # bytes of a rank's queries, and of its keys; values as many
        exchanges = (q + 2 * kv, q, q, q + 2 * kv)
        seconds = sum(cost.seconds("all_to_all", "pairwise", each, n, link) for each in exchanges)
        sent = (n - 1) / n * sum(exchanges)
        assert js(opened, f"allToAllSeconds({n}, {sent}, {js_link(link)})") == pytest.approx(seconds)
        full = 96_000 * n
        both = [cost.seconds(op, "ring", full, n, link) for op in ("all_gather", "reduce_scatter")]
        sent = 8 * (n - 1) / n * full
        assert js(opened, f"sequenceSeconds({n}, {sent}, {js_link(link)})") == pytest.approx(4 * sum(both))
        gradients = cost.traffic("all_reduce", "ring", (10 * 64**2 + 2 * 64 * 32) * 24, 2, n, 0).bytes_sent
        assert 24 * js(opened, f"gradientBytes({n}, 64, 32, 2)") == pytest.approx(gradients)


def test_the_borders_between_techniques_are_where_they_send_equally_many_bytes(opened: Browser):
    for n, heads, kv_heads in ((2, 8, 8), (4, 32, 8), (8, 16, 8)):
        w, kv = heads * 64, kv_heads * 64
        gradients = 2 * (n - 1) / n * js(opened, f"layerParameters({w}, {kv})")
        for name, per_token in (("ring", 6 * kv), ("allToAll", 4 * (w + kv) / n)):
            tokens = js(opened, f"tokensFrom('{name}', {n}, {w}, {kv})")
            assert per_token * (n - 1) / n * tokens + gradients == pytest.approx(8 * (n - 1) / n * tokens * w)
        if w == kv:  # as the README has it
            assert js(opened, f"tokensFrom('ring', {n}, {w}, {w})") == pytest.approx(12 * w)
            assert js(opened, f"tokensFrom('allToAll', {n}, {w}, {w})") == pytest.approx(3 * n / (n - 1) * w)
        border = js(opened, f"ringLeastBelow({w}, {kv})")
        for ranks in range(2, 12):
            sends_less = 6 / ranks * kv < 4 / ranks**2 * (w + kv)
            assert sends_less == (ranks < border) or math.isclose(ranks, border)
