"""Buckets: flat memory in which the gradients of several parameters live, and what travels for them.

flat      | gradient 4 | gradient 3 | gradient 2 | extra |      param.grad is a view of its part
on wire   the same, or rounded to bf16 or fp16
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from data_parallel.flat import fill
from data_parallel.in_order import InOrder


class Bucket:
    """Room for the gradients of some parameters, one behind the other, and `num_extra` numbers at the end.

    `wire_dtype` is what it has on the way, if not its own.
    """

    def __init__(
        self, parameters: list[nn.Parameter], num_extra: int = 0, wire_dtype: torch.dtype | None = None
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(
            sum(sizes) + num_extra, dtype=parameters[0].dtype, device=parameters[0].device
        )
        *parts, self.extra = self.flat.split([*sizes, num_extra])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._wire_dtype = wire_dtype
        # A complex number is two real ones when it is rounded.
        self._numbers = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        travels = self._numbers if wire_dtype else self.flat
        self.on_wire = travels.numel(), (wire_dtype or travels.dtype).itemsize  # for the formula

    def to_wire(self, ranks: int) -> tuple[Tensor, str]:
        """Return the tensor that travels, and the reduction that makes it the mean."""
        if self._wire_dtype is None:
            return self.flat, "mean"
        # Divided first: the sum over many ranks, or one rank's gradient, may be too large for fp16.
        return (self._numbers / ranks).to(self._wire_dtype), "sum"

    def from_wire(self, wire: Tensor) -> None:
        """Take what has arrived."""
        if wire is not self.flat:
            self._numbers.copy_(wire)


class Layout:
    """Which bucket each gradient lives in, and which gradients a bucket still waits for.

    `launch(k)` is called when bucket k and all before it are complete.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        order: list[int],
        caps: tuple[int, int],
        wire_dtype: torch.dtype | None,
        launch: Callable[[int], None],
    ) -> None:
        self._parameters, self.order = parameters, order
        self.buckets: list[Bucket] = []
        self._place: dict[int, tuple[int, Tensor]] = {}  # in which bucket, and where
        ordered = [parameters[i] for i in order]
        filled = fill(ordered, *caps)
        for k, positions in enumerate(filled):
            # At the end of the last one, a number for each parameter: has any rank used it?
            num_flags = len(ordered) if k == len(filled) - 1 else 0
            self.buckets.append(Bucket([ordered[at] for at in positions], num_flags, wire_dtype))
            for at, view in zip(positions, self.buckets[k].views, strict=True):
                self._place[order[at]] = (k, view)
                if ordered[at].grad is not None:
                    self.move_in(order[at])
        self._launches = InOrder(len(filled), launch)
        self.begin()

    def begin(self) -> None:
        """Wait for all gradients again."""
        self.complete: set[int] = set()
        self._to_come = [len(bucket.views) for bucket in self.buckets]
        self._launches.reset()

    def view(self, i: int) -> Tensor:
        """The place of gradient i."""
        return self._place[i][1]

    def move_in(self, i: int) -> None:
        """Have gradient i in its place; nothing is copied where it is there already."""
        parameter, view = self._parameters[i], self.view(i)
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def completed(self, i: int) -> None:
        """Gradient i is complete."""
        self.complete.add(i)
        k, _ = self._place[i]
        self._to_come[k] -= 1
        if self._to_come[k] == 0:
            self._launches.ready(k)
