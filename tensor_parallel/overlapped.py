"""Hide the reduction in a column-parallel layer's backward behind the gradient of the weight.

      backward without overlap   | grad of x | grad of W | all-reduce of grad x |
      here                       | grad of x | grad of W |
                                             | all-reduce of grad x |

A backward computes two products. The input's gradient comes first, and is reduced while the second one, the
weight's gradient, is computed. Autograd's own order cannot be relied on for that, so the forward and
backward of the layer are one autograd function here.

With sequence parallelism the function also keeps only this rank's tokens for the backward, and gathers the
others a second time there, during the first product: a quarter more bytes, and an n-th of the memory. After
Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 4.2.2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm.chosen_pattern import chosen_pattern
from comm.collectives import Group, all_reduce
from comm.functions import InFlightAllGather, InFlightReduceScatter


def overlapped_column_parallel(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: Group, dim: int | None
) -> tuple[Tensor, ...]:
    """Return F.linear(x, weight, bias) of each layer, where the backward reduces x's gradient over the group.

    With `dim`, x is this rank's shard along that dim. It is gathered, and its gradient reduce-scattered.
    """
    x, *parameters = _as_autocast(x, *weights, *biases)
    return _ColumnParallel.apply(x, group, dim, len(weights), *parameters)


class _ColumnParallel(Function):
    """Linear layers with an all-reduce backward; with `dim`, all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int | None, count: int, *parameters: Any) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.dim, ctx.has_bias = group, dim, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        full = x if dim is None else InFlightAllGather(x, dim, group).wait()
        return tuple(F.linear(full, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        gathering = None if ctx.dim is None else InFlightAllGather(x, ctx.dim, ctx.group)
        grad_x = sum(grad @ weight.conj() for grad, weight in zip(grads, weights, strict=True))
        full = x if gathering is None else gathering.wait()
        if not ctx.needs_input_grad[0]:
            reducing = None
        elif ctx.dim is None:
            grad_x = grad_x.contiguous()
            pattern = chosen_pattern("all_reduce", ctx.group)
            reducing = all_reduce(grad_x, group=ctx.group, async_op=True, pattern=pattern)
        else:
            reducing = InFlightReduceScatter(grad_x, ctx.dim, ctx.group)
        # These products hide the reduction.
        inputs = full.reshape(-1, full.shape[-1]).conj()
        outputs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_weights = [grad.t() @ inputs for grad in outputs]
        grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
        if reducing is not None:
            scattered = reducing.wait()
            grad_x = grad_x if ctx.dim is None else scattered
        return grad_x, None, None, None, *grad_weights, *grad_biases


def _as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast what F.linear would cast under torch.autocast, which does not reach into an autograd function."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):  # a shape alone has no autocast
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)

    def is_cast(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != torch.float64

    return [tensor.to(dtype) if tensor is not None and is_cast(tensor) else tensor for tensor in tensors]
