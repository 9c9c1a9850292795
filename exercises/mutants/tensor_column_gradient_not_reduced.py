"""Norms and embeddings drift apart: their gradients come from each rank's own attention heads only."""

from torch import Tensor

TARGET = "tensor_parallel.overlapped._ColumnParallel.backward"
KILLER = "tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "not added up over the ranks"


def mutant(ctx, *grads: Tensor):
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    outputs = [grad.flatten(0, -2) for grad in grads]
    grad_weights = [grad.t() @ x.flatten(0, -2) for grad in outputs]
    grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
    return grad_x, None, None, None, *grad_weights, *grad_biases
