"""Gradients below a row layer are n times too large, below two n * n times; Adam hides the error."""

from torch import Tensor
from torch.autograd import Function

from comm.collectives import Group
from comm.functions import summed

TARGET = "comm.functions.sum_over_ranks"
KILLER = "tests.comm.test_functions.test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum"
CAUSE = "The backward of a sum over ranks is the identity"


def mutant(x: Tensor, group: Group = None) -> Tensor:
    return _SummedBothWays.apply(x, group)


class _SummedBothWays(Function):
    """All-reduces the gradient too. So does torch.distributed.nn, whose ranks may use the sum differently."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None
