"""The gradients of the other ranks are lost: the root learns only from its own use of the tensor."""

from torch import Tensor
from torch.autograd import Function

from comm.collectives import Group, broadcast

TARGET = "comm.functions.broadcast_from_root"
KILLER = "tests.comm.test_functions.test_the_conjugate_of_a_broadcast_is_a_sum_and_that_of_a_sum_a_broadcast"
CAUSE = "The backward of a broadcast is such a sum"


def mutant(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    return _Broadcast.apply(x, root, group)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx, x: Tensor, root: int, group: Group) -> Tensor:
        copy = x.clone()
        broadcast(copy, root, group)
        return copy

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
