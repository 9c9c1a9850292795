"""Compute by formula what a rank sends for the attention of all layers.

      ring          forward    k and v of n-1 ranks: all but the right neighbour's
                    backward   the same again, and the gradients of n-1 ranks' k and v
      all-to-all    forward    q, k, v of own tokens for the other ranks' heads, and y of their tokens
                    backward   the same again

With T tokens in a step, width w of the queries and w_kv of keys and values, n ranks with equally many tokens,
a rank sends in a layer, forward and backward together:

      ring          6 (n-1)/n T w_kv numbers
      all-to-all    4 (n-1)/n^2 T (w + w_kv) numbers
      sequence parallelism (lesson 3)    8 (n-1)/n T w numbers with --no-overlap, else 10 (n-1)/n T w

The functions below hold for any lengths. `ContextParallel.traffic` adds them up over layers, with the mean of
the gradients.
"""

from comm.cost import pairwise_traffic
from context_parallel.parallel_model import SharedSequence
from lab.trace.ledger import Traffic


def ring_layer(
    sequence: SharedSequence, head: int, num_heads: int, kv_heads: int, itemsize: int
) -> tuple[Traffic, Traffic]:
    """Return what this rank sends for the attention of a layer: in the forward, and in the backward.

    `head` is the number of elements of one position and one head, in all examples.
    """
    rank, n = sequence.rank, sequence.size
    passed_on = [sequence.cut.length((rank - step) % n) for step in range(n - 1)]
    gradients = [sequence.cut.length((rank - step) % n) for step in range(1, n)]

    def traffic(lengths: list[int]) -> Traffic:
        sent = [length for length in lengths if length]
        return Traffic(sum(sent) * 2 * head * kv_heads * itemsize, len(sent))

    return traffic(passed_on), traffic(passed_on + gradients)


def all_to_all_layer(
    sequence: SharedSequence, head: int, num_heads: int, kv_heads: int, itemsize: int
) -> tuple[Traffic, Traffic]:
    """Return what this rank sends for the attention of a layer, as `ring_layer` does."""
    rank, n, lengths = sequence.rank, sequence.size, sequence.lengths
    q, kv = num_heads // n, kv_heads // n  # heads of a rank
    to_heads = pairwise_traffic([lengths[rank] * (q + 2 * kv) * head] * n, itemsize, rank)
    to_tokens = pairwise_traffic([length * q * head for length in lengths], itemsize, rank)
    # A gradient takes its tensor's way back.
    back_to_tokens = pairwise_traffic([length * (q + 2 * kv) * head for length in lengths], itemsize, rank)
    back_to_heads = pairwise_traffic([lengths[rank] * q * head] * n, itemsize, rank)
    return to_heads + to_tokens, back_to_tokens + back_to_heads
