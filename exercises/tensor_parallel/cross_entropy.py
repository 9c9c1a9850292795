"""The vocabulary-parallel cross entropy. Write `_CrossEntropy.forward` and `_CrossEntropy.backward` of
tensor_parallel/cross_entropy.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/cross_entropy.py
yet: it has the solution.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.
    chosen_pattern(op: str, group: Group = None) -> str
        Return the pattern chosen for the group; if none is chosen or `op` lacks it, the default.
    own_rows(tokens, rows_per_rank, vocab_size, group, what='token') -> tuple[Tensor, Tensor]
        Return each token's row in this rank's weight, and which tokens have one; the others get row
        0.

Check it with `python -m exercises check cross_entropy`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import Group, all_reduce, chosen_pattern
from tensor_parallel.layers import own_rows


def forward(
    ctx: Any, logits_tv: Tensor, targets: Tensor, vocab_size: int, group: Group, ignore: int
) -> Tensor:
    """Return the mean loss over the targets that are not `ignore`, the same on every rank.

    A rank has the logits of v entries of the vocabulary; those from `vocab_size` on are padding, and
    have no probability. own_rows(tokens, v, vocab_size, group, what) returns for each target its
    column here, and whether it has one; an ignored target may stand for entry 0. The loss of a token
    is log(sum of exp(logit - max)) + max - logit of the target. The logits of 16-bit dtypes are
    computed with in float32. Pass `chosen_pattern("all_reduce", group)` to all_reduce. Save in `ctx`
    what the backward needs.
    """
    raise NotImplementedError("`_CrossEntropy.forward` is not written yet.")


def backward(ctx: Any, grad: Tensor) -> Any:
    """Return the gradient of this rank's logits, and None for each other argument of forward.

    `grad` is the gradient of the mean loss. The result has the shape and dtype of the logits.
    Nothing has to be sent.
    """
    raise NotImplementedError("`_CrossEntropy.backward` is not written yet.")
