"""Tokens for heads. Write `all_tokens_of_own_heads` and `all_heads_of_own_tokens` of
context_parallel/train_all_to_all_attention.py.

Read notebooks/11_long_sequences.ipynb first. Do not open context_parallel/train_all_to_all_attention.py
yet: it has the solution.

You may use:

    exchange_shards(x, dim, group=None, sent=None, received=None) -> Tensor
        All-to-all along `dim` forward, all-to-all backward: shard p of `x` goes to rank p.
    sequence.size: int
        The number of ranks.

Check it with `python -m exercises check all_to_all_heads`.
"""

from torch import Tensor

from comm.functions import exchange_shards
from context_parallel.parallel_model import SharedSequence


def all_tokens_of_own_heads(x_bnhte: Tensor, sequence: SharedSequence) -> Tensor:
    """Send each of n ranks its heads of this rank's tokens; return (b, h, all tokens, e) of own heads.

    `x_bnhte` is (batch, ranks, heads of a rank, own tokens, e). `exchange_shards(x, dim, group,
    sent, received)` is a differentiable all-to-all along `dim`: it sends the first sent[0] entries
    to rank 0, and so on, and returns what arrives, in the order of the ranks. `sequence.lengths`
    has the number of tokens of each rank, and the ranks' tokens are in the order of the sequence.
    """
    raise NotImplementedError("`all_tokens_of_own_heads` is not written yet.")


def all_heads_of_own_tokens(y_bhte: Tensor, sequence: SharedSequence) -> Tensor:
    """Send each rank its tokens of this rank's heads; return (b, all heads, own tokens, e).

    `y_bhte` has all tokens of this rank's heads.
    """
    raise NotImplementedError("`all_heads_of_own_tokens` is not written yet.")
