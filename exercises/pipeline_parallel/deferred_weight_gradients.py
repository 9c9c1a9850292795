"""A backward in two halves. Write `SplitLinear.forward` and `SplitLinear.backward` of
pipeline_parallel/deferred.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/deferred.py yet: it has the solution.

You may use:

    add_to(parameter: Tensor, gradient: Tensor) -> None
        Add to the gradient of a parameter, or begin it.
    note_held(*tensors: Tensor) -> None
        Count tensors that are kept for a later computation without autograd's help.

Check it with `python -m exercises check deferred_weight_gradients`.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lab.trace.memory import note_held
from pipeline_parallel.deferred import Later, add_to


def forward(ctx: Any, later: Later, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias), and keep in `ctx` what the backward needs.

    Do not pass the weight to save_for_backward: with recomputation a copy would come back, but the
    parameter itself must get the gradient.
    """
    raise NotImplementedError("`SplitLinear.forward` is not written yet.")


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients for `later`, x, weight and bias; all but that of x are None.

    If the weight or the bias needs a gradient, do not compute it, but append a function without
    arguments to the list `ctx.later`. The function runs later, and adds to the gradients of
    weight and bias. `add_to(parameter, gradient)` adds to a gradient or begins it. The gradient
    of x is None if x needs none: ctx.needs_input_grad tells, in the order of forward's arguments
    after `ctx`.
    """
    raise NotImplementedError("`SplitLinear.backward` is not written yet.")
