"""Add up gradients over ranks exactly once, however backwards and calls of finish_gradient_sync() alternate.

      backward    grad = a                       of this rank's tokens
      finish      grad = A                       the sum over all ranks
      backward    grad = b, and A is set aside   the sum over ranks of A + b would count A n times
      finish      grad = A + B

Where there is one backward between two calls of `zero_grad()`, nothing is set aside.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class PartialGradients:
    """Tracks parameters for which each rank's backward computes one term of the gradient."""

    def __init__(self) -> None:
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._complete: set[nn.Parameter] = set()  # with the sum over ranks as their gradient
        self._tracked: set[nn.Parameter] = set()

    def track(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set a complete gradient aside when a backward is about to add to it, from now on."""
        for parameter in parameters:
            if parameter not in self._tracked and parameter.requires_grad:
                self._tracked.add(parameter)
                parameter.register_hook(lambda _, parameter=parameter: self._set_aside(parameter))

    def _set_aside(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            self._aside.pop(parameter, None)  # the program has called zero_grad()
        elif parameter in self._complete:
            self._aside[parameter], parameter.grad = parameter.grad, None
        self._complete.discard(parameter)

    @contextmanager
    def completing(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Yield the gradients that are incomplete; the caller must add each up over the ranks, in place."""
        self.track(parameters)  # some may be new, or were frozen before
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        partial = {p: g for p, g in gradients.items() if p not in self._complete}
        yield list(partial.values())
        for parameter, gradient in partial.items():
            if (before := self._aside.get(parameter)) is not None:
                gradient = parameter.grad = before.add_(gradient)
            self._complete.add(parameter)
        self._aside.clear()
