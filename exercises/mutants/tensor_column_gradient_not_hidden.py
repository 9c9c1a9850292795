"""Results are right but slow: the backward waits for the input gradient before it computes the weight's."""

from torch import Tensor

from comm.functions import InFlightAllGather, InFlightReduceScatter, summed

TARGET = "tensor_parallel.overlapped._ColumnParallel.backward"
KILLER = (
    "tests.tensor_parallel.test_layers"
    ".test_the_inputs_gradient_is_sent_while_the_weights_gradient_is_computed"
)
CAUSE = "`launched`"


def mutant(ctx, *grads: Tensor):
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    if ctx.dim is not None:
        x, grad_x = (
            InFlightAllGather(x, ctx.dim, ctx.group).wait(),
            InFlightReduceScatter(grad_x, ctx.dim, ctx.group).wait(),
        )
    else:
        grad_x = summed(grad_x, ctx.group)
    outputs = [grad.flatten(0, -2) for grad in grads]
    grad_weights = [grad.t() @ x.flatten(0, -2) for grad in outputs]
    grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
    return grad_x, None, None, None, *grad_weights, *grad_biases
