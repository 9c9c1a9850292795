"""Compute by formula what a rank sends in a step of context parallelism, in the attention of all layers.

      ring          forward    k and v of n-1 ranks: all but the right neighbour's
                    backward   the same again, and the gradients of n-1 ranks' k and v
      all-to-all    forward    q, k, v of own tokens for the other ranks' heads, and y of their tokens
                    backward   the same again

With T tokens in a step, width w of the queries and w_kv of keys and values, n ranks with equally many tokens,
a rank sends in a layer, forward and backward together:

      ring          6 (n-1)/n T w_kv numbers
      all-to-all    4 (n-1)/n^2 T (w + w_kv) numbers
      sequence parallelism (lesson 3)    8 (n-1)/n T w numbers

The functions below hold for any lengths, without autocast. All-to-alls also send headers (comm/cost.py).
"""

from collections.abc import Sequence as List

from comm.cost import header_traffic, pairwise_traffic
from context_parallel.parallel_model import ContextParallel
from lab.ledger import Traffic


def ring_traffic(model: ContextParallel, shape: List[int]) -> Traffic:
    """Return what this rank sends for the attention of all layers, forward and backward.

    `shape` is that of the full tokens: batch, time.
    """
    sequence, config = model.sequence, model.module.config
    assert sequence is not None
    rank, n = sequence.rank, sequence.size
    numbers = 2 * shape[0] * config.kv_heads * config.width // config.num_heads  # k and v of one position
    itemsize = next(model.module.parameters()).itemsize
    passed_on = [sequence.cut.length((rank - step) % n) for step in range(n - 1)]
    gradients = [sequence.cut.length((rank - step) % n) for step in range(1, n)]
    sent = [length for length in [*passed_on, *passed_on, *gradients] if length]
    layers = config.num_layers
    return Traffic(sum(sent) * numbers * itemsize * layers, len(sent) * layers)


def all_to_all_traffic(model: ContextParallel, shape: List[int]) -> Traffic:
    """Return what this rank sends for the attention of all layers, forward and backward.

    `shape` is that of the full tokens: batch, time.
    """
    sequence, config = model.sequence, model.module.config
    assert sequence is not None
    rank, n, lengths = sequence.rank, sequence.size, sequence.lengths
    itemsize = next(model.module.parameters()).itemsize
    head = shape[0] * config.width // config.num_heads  # numbers of one position and one head
    q, kv = config.num_heads // n, config.kv_heads // n  # heads of a rank
    to_heads = pairwise_traffic([lengths[rank] * (q + 2 * kv) * head] * n, itemsize, rank)
    to_tokens = pairwise_traffic([length * q * head for length in lengths], itemsize, rank)
    headers = header_traffic(n, uneven_parts=len(set(lengths)) > 1)
    # A gradient takes its tensor's way back.
    back_to_tokens = pairwise_traffic([length * (q + 2 * kv) * head for length in lengths], itemsize, rank)
    back_to_heads = pairwise_traffic([lengths[rank] * q * head] * n, itemsize, rank)
    calls = [to_heads, to_tokens, back_to_tokens, back_to_heads]
    return sum([call + headers for call in calls] * config.num_layers, Traffic())
