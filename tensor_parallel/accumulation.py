"""Which gradients are complete, where several backwards and calls of finish_gradient_sync() take turns.

      backward    grad = a                       this rank's tokens
      finish      grad = A                       all ranks' tokens
      backward    grad = b, and A is set aside   to add up A + b among the ranks would count A on each of them
      finish      grad = A + B

In the usual loop, with one backward between two `zero_grad()`, nothing is set aside.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class PartialGradients:
    """Parameters of which each rank's backward has a part of the gradient."""

    def __init__(self) -> None:
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._watched: set[nn.Parameter] = set()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set complete gradients of `parameters` aside when a backward is about to add to them."""
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched.add(parameter)
                parameter.register_hook(lambda _, parameter=parameter: self._set_aside(parameter))

    def _set_aside(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            self._aside.pop(parameter, None)  # zeroed
        elif getattr(parameter.grad, "is_complete", False):
            self._aside[parameter], parameter.grad = parameter.grad, None

    @contextmanager
    def completing(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Yield the gradients that are not complete: the caller adds them up among the ranks, in place."""
        self.watch(parameters)  # some may be new, or were frozen
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        partial = {p: g for p, g in gradients.items() if not getattr(g, "is_complete", False)}
        yield list(partial.values())
        for parameter, gradient in partial.items():
            if (before := self._aside.get(parameter)) is not None:
                gradient = parameter.grad = before.add_(gradient)
            gradient.is_complete = True  # type: ignore[attr-defined]
        self._aside.clear()
