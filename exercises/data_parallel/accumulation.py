"""Gradient accumulation. Write `accumulate` of data_parallel/train_naive_grad_accumulation.py.

Read notebooks/04_naive_data_parallel.ipynb first. Do not open
data_parallel/train_naive_grad_accumulation.py yet: it has the solution.

You may use:

    loss_of(logits_btv: Tensor, targets_bt: Tensor) -> Tensor
        Return the cross entropy in nats, a scalar: the mean over all b * t tokens.

Check it with `python -m exercises check accumulation`.
"""

import torch
from torch import Tensor, nn

from lab.models.model import loss_of
from lab.trace.timeline import span


def accumulate(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of a step's microbatches in the parameters, and return the loss of all of them.

    A microbatch is a pair (x, y), and all are equal in size. The loss is the mean over all examples, and the
    gradients are those of this loss. It has no graph.
    """
    raise NotImplementedError("`accumulate` is not written yet.")
