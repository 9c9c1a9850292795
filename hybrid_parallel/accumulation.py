"""Add the gradients of several calls of `HybridParallel.backward`, as several backwards of one process do.

      backward    gradient A, complete
      backward    A is set aside; gradient B, complete; A + B        without that, A would be completed twice

To complete a gradient is to take sums and means over ranks, of what one backward has computed. The classes
of the axes could each tell old from new; ZeRO 1 and 2 refuse a second backward. Here it is done once for all.
It takes the memory of another copy of the gradients, while there are several backwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def adding_to_earlier(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the block compute gradients from none, and then add those that there were before.

    `optimizer` has what this rank trains: parameters, or with ZeRO its pieces of them.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Copies, because the buckets of a backward use the memory of the gradients before.
    earlier = {p: p.grad.as_subclass(Tensor).clone() for p in trained if p.grad is not None}
    if earlier:
        optimizer.zero_grad()
    yield
    for parameter, gradient in earlier.items():
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.as_subclass(Tensor).add_(gradient)
