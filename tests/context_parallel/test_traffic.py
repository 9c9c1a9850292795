"""What a rank sends in a step, and how long it computes and waits, by formula and as counted."""

import time

import pytest
import torch

from comm.cost import Link
from context_parallel.clock import clock
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import CUTS, AttentionPart, SequenceCut
from context_parallel.traffic import all_to_all_layer, ring_layer
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.trace.ledger import LEDGER, Traffic
from tests.context_parallel.equivalence import ALL_TO_ALL, CONTIGUOUS_RING, RING, Variant, gpt, text
from tests.on_ranks import on_ranks
from training.gradients import average_traffic

VARIANTS = (RING, CONTIGUOUS_RING, ALL_TO_ALL)
B, D, ITEM = 2, 24, 8  # batch, width, bytes of a number
LENGTHS = (1, 17, 24)  # of 4 ranks: some have no token, they have unequally many, or equally many


def counted(variant: Variant, length: int, **changes: int) -> tuple[Traffic, Traffic, Traffic, Traffic]:
    """Return what this rank sends in attention and in finish_gradient_sync, counted and expected."""
    model = variant.wrap(gpt(**changes))
    x, y = text(length)
    LEDGER.clear()
    loss = model.loss(model(x), y)
    loss.backward()
    attention = LEDGER.total()
    model.finish_gradient_sync()
    layer = ring_layer if variant.is_ring else all_to_all_layer
    gradients = average_traffic(model.parameters())
    return attention, LEDGER.total() - attention, model.traffic(x.shape, layer) - gradients, gradients


@on_ranks(4)
def test_each_rank_sends_what_the_formulas_say_for_uneven_lengths_too(cluster: Cluster):
    for variant in VARIANTS:
        for length in LENGTHS:
            changes = {"num_layers": 1, "num_kv_heads": 4}
            attention, gradients, expected, expected_gradients = counted(variant, length, **changes)
            assert (attention, gradients) == (expected, expected_gradients), f"{variant}, {length} tokens"
    assert not any(entry.by_formula for entry in LEDGER.rows())


@on_ranks(3)
def test_the_closed_formulas_hold_where_all_ranks_have_equally_many_tokens(cluster: Cluster):
    """6 (n-1)/n T w_kv for the ring, 4 (n-1)/n^2 T (w + w_kv) for the all-to-all, for each sequence."""
    n, tokens, layers = 3, 24, 2
    for kv_heads in (12, n):
        kv_width = D * kv_heads // 12
        for variant in VARIANTS:
            attention, *_ = counted(variant, tokens, num_layers=layers, num_kv_heads=kv_heads)
            if not variant.is_ring:
                numbers = 4 * (n - 1) * B * tokens * (D + kv_width) // n**2
                by_op = {e.op: t.bytes_sent for e, t in LEDGER.rows().items() if e.pattern != "header"}
                assert by_op["all_to_all"] == numbers * layers * ITEM
            else:
                numbers = 6 * (n - 1) * B * tokens * kv_width // n
                assert attention == Traffic(numbers * layers * ITEM, 3 * (n - 1) * layers), str(variant)


@on_ranks(3)
def test_a_rank_sends_keys_and_values_round_the_ring_once_forward_and_twice_backward(cluster: Cluster):
    n, cut = cluster.world_size, SequenceCut.zigzag(24, cluster.world_size)
    q, k, v = (torch.ones(1, 2, 24 // n, 4).double().requires_grad_() for _ in range(3))
    block = k.nbytes + v.nbytes
    for what, rounds in (("forward", n - 1), ("backward", 2 * n - 1)):
        LEDGER.clear()
        if what == "forward":
            y = ring_attention(q, k, v, SharedSequence(None, cut))
        else:
            y.sum().backward()
        sent = LEDGER.total().bytes_sent / block
        assert sent <= rounds + 0.2, (
            f"the {what} on {n} ranks sends the keys and values of {sent:.2f} ranks, and not {rounds}"
        )


def test_contiguous_pieces_take_1_75_times_as_long_on_four_ranks_and_the_zigzag_cut_is_balanced():
    cuts = {name: make(4096, 4) for name, make in CUTS.items()}
    ratios = {name: sum(step_pairs(cut)) / balanced_pairs(cut) for name, cut in cuts.items()}
    assert ratios == {"zigzag": 1, "contiguous": pytest.approx(1.75, rel=1e-3)}


def test_a_clock_sleeps_in_proportion_to_the_pairs_and_twice_as_long_in_the_backward():
    kernel, x, lse = clock(0.01, length=4), torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4)
    for part, seconds in (
        (AttentionPart(slice(0, 4), slice(0, 4), is_causal=True), 0.01),
        (AttentionPart(slice(0, 4), slice(0, 4)), 0.016),
    ):
        start = time.perf_counter()
        kernel.attend(x, x, x, part)
        middle = time.perf_counter()
        kernel.backward(x, x, x, x, x, lse, part)
        assert middle - start >= seconds and time.perf_counter() - middle >= 2 * seconds


def test_the_formula_hides_messages_behind_attention_and_pays_for_the_last_gradients():
    message = Link(1.0, 0.0)  # takes a second, whatever its size
    assert ring_seconds([5], 1.0, 100, message) == 5 + 10, "one rank sends nothing"
    # Two ranks: each block computes longer than a message, and the last gradients travel home.
    assert ring_seconds([2, 3], 1.0, 100, message) == (2 + 3) + (4 + 6) + 1
    # Three ranks that compute nothing: two messages forward, and backward two of keys and two of gradients.
    assert ring_seconds([0, 0, 0], 1.0, 100, message) == 2 + 4
    assert ring_seconds([0, 0], 1.0, 100, Link(0.0, 0.01)) == 1 + (1 + 1)
