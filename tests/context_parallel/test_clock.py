"""By formula the zigzag cut is balanced, contiguous chunks are not, and messages take time."""

import time

import pytest
import torch

from comm.cost import Link
from context_parallel.clock import clock
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.sequence_cut import CUTS, AttentionPart


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
