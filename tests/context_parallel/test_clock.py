"""By a clock and by formula the zigzag cut is balanced, contiguous pieces are not, and messages take time."""

import time

import pytest
import torch

from comm import collectives
from comm.cost import Link
from context_parallel.clock import clock
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import CUTS
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.ranks import run_ranks

RANKS, LENGTH = 4, 4096


def test_a_clock_shows_the_makespan_that_the_pairs_predict():
    """The zigzag cut is balanced; with contiguous pieces four ranks take 1.75 times as long."""
    seconds = 0.3  # of the causal attention to one sequence on one rank
    cuts = {name: make(LENGTH, RANKS) for name, make in CUTS.items()}
    ratios = {name: sum(step_pairs(cut)) / balanced_pairs(cut) for name, cut in cuts.items()}
    assert ratios == {"zigzag": 1, "contiguous": pytest.approx(1.75, rel=1e-3)}

    def work(cluster: Cluster) -> dict[str, float]:
        fastest = {}
        for name, cut in cuts.items():
            sequence = SharedSequence(None, cut, clock(seconds, LENGTH))
            tokens = sequence.cut.length(cluster.rank)
            q, k, v = (torch.zeros(1, 1, tokens, 4, requires_grad=True) for _ in range(3))
            spent = []
            for _ in range(3):
                collectives.barrier()
                start = time.perf_counter()
                ring_attention(q, k, v, sequence).sum().backward()
                collectives.barrier()
                spent.append(time.perf_counter() - start)
            fastest[name] = min(spent)  # others may use the machine, too
        return fastest

    balanced = 3 * seconds / RANKS  # a backward takes twice as long as a forward
    for fastest in run_ranks(work, RANKS):
        assert 1 <= fastest["zigzag"] / balanced < 1.3
        assert fastest["contiguous"] / balanced > 1.6


def test_the_formula_hides_messages_behind_attention_and_pays_for_the_last_gradients():
    message = Link(1.0, 0.0)  # takes a second, whatever its size
    assert ring_seconds([5], 1.0, 100, message) == 5 + 10, "one rank sends nothing"
    # Two ranks: each block computes longer than a message, and the last gradients travel home.
    assert ring_seconds([2, 3], 1.0, 100, message) == (2 + 3) + (4 + 6) + 1
    # Three ranks that compute nothing: two messages forward, and backward two of keys and two of gradients.
    assert ring_seconds([0, 0, 0], 1.0, 100, message) == 2 + 4
    assert ring_seconds([0, 0], 1.0, 100, Link(0.0, 0.01)) == 1 + (1 + 1)
