"""A backward in two halves. Write `_Linear.forward` and `_Linear.backward` of pipeline_parallel/deferred.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/deferred.py yet: it contains the
solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    _add_to(parameter: Tensor, gradient: Tensor) -> None
        Add to the gradient of a parameter, or begin it.
    _autocast_dtype(x: Tensor) -> torch.dtype | None
        Return the dtype of products under torch.autocast; None if it is off or leaves `x` as it is.
    _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None
        Return the tensor in that dtype, or as it is if there is no tensor or no dtype.
    deferred_gradients.add(computation: Callable[[], None], *tensors: Tensor) -> None
    DeferredGradients(waiting: list[Callable[[], None]], tensors: list[Tensor])
        Holds one microbatch's weight gradients that are still to be computed, and the tensors they
        need.

Check it with `python -m exercises check deferred_weight_gradients`.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pipeline_parallel.deferred import DeferredGradients, _add_to, _autocast_dtype, _cast


def forward(ctx: Any, deferred: DeferredGradients, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias), and keep in `ctx` what the backward needs.

    Under torch.autocast the product has another dtype: `_autocast_dtype(x)`, or None. `_cast(tensor,
    dtype)` casts where both are given. Do not pass the weight to save_for_backward: with
    recomputation a copy would come back, but the parameter itself must get the gradient.
    """
    raise NotImplementedError("A backward in two halves is not written yet: `_Linear.forward` has no body.")


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients for `deferred`, x, weight and bias; all but that of x are None.

    If the weight or the bias needs a gradient, do not compute it, but call
    `deferred.add(computation, x, dy)`: the computation is a function without arguments that runs
    later and adds to the gradients of weight and bias. `_add_to(parameter, gradient)` adds to a
    gradient or begins it. The gradient of x is None if x needs none: ctx.needs_input_grad tells,
    in the order of forward's arguments after `ctx`.
    """
    raise NotImplementedError("A backward in two halves is not written yet: `_Linear.backward` has no body.")
