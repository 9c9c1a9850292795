"""Attention in parts. Write `join` of context_parallel/block_attention.py.

Read notebooks/11_long_sequences.ipynb first. Do not open context_parallel/block_attention.py yet: it has
the solution.

Check it with `python -m exercises check join_attention`.
"""

import torch
from torch import Tensor


def join(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of both results, and its log-sum-exp (b, h, t).

    `y` (b, h, t, e) is what queries have found among some keys, normalised over these keys alone,
    and `lse` (b, h, t) is the logarithm of the sum of the exponentials of their scores. `other_y`
    and `other_lse` are the same for other keys. Scores may be so large that exp of them is
    infinite.
    """
    raise NotImplementedError("`join` is not written yet.")
