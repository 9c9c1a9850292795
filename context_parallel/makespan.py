"""Predict the time of ring attention from the speed of a rank and of a link.

      forward      step s takes max(c_s, m), the last step c_s
      backward     step s takes max(2 c_s, m * messages under way), and at the end m for the last gradients

c_s is the time of the attention that the busiest rank computes in step s of the ring, m that of a message of
keys and values. In the backward keys are under way in each step but the last, and gradients from step 2 on.
The backward of attention is taken to compute twice as long as its forward. The sum of maxima is exact if the
same rank is busiest in each step, as with contiguous chunks under a causal mask, or if all are equally busy,
as with the zigzag cut of a length that 2n divides. Else it is an upper bound.
"""

from collections.abc import Sequence

from comm.cost import Link
from context_parallel.sequence_cut import SequenceCut


def step_pairs(cut: SequenceCut) -> list[float]:
    """Return, for each step of the ring, the pairs of query and key that the busiest rank computes."""
    n = len(cut.chunks)
    return [
        max(sum(part.pairs for part in cut.parts(rank, (rank - step) % n)) for rank in range(n))
        for step in range(n)
    ]


def balanced_pairs(cut: SequenceCut) -> float:
    """Return the pairs of each rank if all computed equally many."""
    n = len(cut.chunks)
    pairs = (part.pairs for rank in range(n) for source in range(n) for part in cut.parts(rank, source))
    return sum(pairs) / n


def ring_seconds(pairs: Sequence[float], seconds_per_pair: float, block_bytes: int, link: Link) -> float:
    """Return the seconds of forward and backward of one layer's attention; `pairs` are of each step.

    `block_bytes` are those of the keys and values of one rank.
    """
    return sum(ring_passes([one * seconds_per_pair for one in pairs], link.alpha + link.beta * block_bytes))


def ring_passes(blocks: Sequence[float], message: float) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward of one layer's attention.

    `blocks` are the seconds of the attention of the forward in each step, and `message` is the seconds of a
    message of keys and values.
    """
    n, forward, backward = len(blocks), 0.0, 0.0
    for step, compute in enumerate(blocks):
        # Gradients leave at the end of each step but the first, so they are under way in the next one.
        keys, gradients = step < n - 1, step > 1
        forward += max(compute, keys * message)
        backward += max(2 * compute, (keys + gradients) * message)
    return forward, backward + (message if n > 1 else 0.0)  # the last gradients travel home
