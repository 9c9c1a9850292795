"""Let an all-to-all travel while the rank computes something else, in the forward and in the backward.

      forward    start ──► compute what does not need it ──► wait ──► use what has arrived
      backward   wait  ◄── the backward of that          ◄── start ◄── its gradient

The all-to-all is cut into two autograd nodes, and each does in the backward what the other does in the
forward. Of the nodes that are ready, autograd runs the one that was made last first. So the backward of what
was computed between the two nodes runs between them again.
"""

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm import collectives
from comm.collectives import Group, Work, chosen_pattern
from comm.errors import CommError


class InFlightExchange:
    """An all-to-all along the first dim. The constructor starts it, `wait` returns what has arrived.

    `sent[p]` rows go to rank p, `received[p]` rows come from it, and they arrive in rank order. All ranks
    must start and wait. If one of them calls the backward, all must, and the inputs of all must require a
    gradient.
    """

    def __init__(self, x: Tensor, sent: list[int], received: list[int], group: Group = None) -> None:
        if len(sent) != dist.get_world_size(group) or sum(sent) != len(x):
            raise CommError(f"exchange: {sent} do not divide {len(x)} rows among the ranks.")
        self._group, self._sent, self._received = group, sent, received
        self._flight: tuple[Work, Tensor, Tensor] | None = None
        self._started: Tensor | None = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """Wait until the all-to-all has ended, and return the rows that this rank has received."""
        # The node of autograd keeps this object, so this object must not keep the node alive.
        started, self._started = self._started, None
        return _Wait.apply(started, self)

    def launch(self, x: Tensor, backward: bool = False) -> Tensor:
        """Start the all-to-all, and return the tensor in which rows are about to arrive."""
        sent, received = (self._received, self._sent) if backward else (self._sent, self._received)
        leaving, arriving = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        width = math.prod(x.shape[1:])
        sizes = [size * width for size in received], [size * width for size in sent]
        pattern = chosen_pattern("all_to_all", self._group)
        work = collectives.all_to_all(arriving, leaving, *sizes, self._group, async_op=True, pattern=pattern)
        self._flight = work, leaving, arriving  # the all-to-all reads what leaves until the end
        return arriving

    def land(self) -> Tensor:
        """Wait for what `launch` has started, and return what has arrived."""
        assert self._flight is not None
        (work, _, arrived), self._flight = self._flight, None
        work.wait()
        return arrived


class _Start(Function):
    """Start forward, wait backward. The output gives autograd the order, and its values are not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: InFlightExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.launch(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.land(), None


class _Wait(Function):
    """Wait forward, start backward: the gradient that is returned is still arriving."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: InFlightExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.launch(grad, backward=True), None
