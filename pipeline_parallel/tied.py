"""Keep what steps have added to the gradient of a tied parameter since its last exchange with the other rank.

      step   grad = a            finish   sends a, grad = a + a'        a', b': the other rank's
      step   grad = a + a' + b   finish   sends b, grad = a + a' + b + b'

To send all of `grad` again would count a' twice. In the usual loop, with one step between two calls of
`zero_grad()`, the new part is `grad` itself, and no second tensor is kept.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lab.launch.errors import WorkbookError


class NewGradients:
    """Holds the gradients of tied parameters that only this rank knows."""

    def __init__(self) -> None:
        self._new: dict[nn.Parameter, Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}  # of the parameters after the last step
        self.is_complete = True

    def forget(self) -> None:
        """Treat the present gradients as complete, as after loading new weights."""
        self._new.clear()
        self._versions.clear()
        self.is_complete = True

    def refuse_if_trained(self) -> None:
        """Raise WorkbookError if a parameter was changed while its gradient was not complete."""
        if any(parameter._version != version for parameter, version in self._versions.items()):
            raise WorkbookError(
                "A parameter that two stages share was changed before finish_gradient_sync() gave both "
                "copies the same gradient, so the copies now differ: begin again, and call "
                "finish_gradient_sync() after each step()."
            )

    @contextmanager
    def collecting(self, tied: Iterable[nn.Parameter]) -> Iterator[None]:
        """Count what a step in the `with` block adds to the gradients of `tied` as new."""
        tied, before = list(tied), {}
        for parameter in tied:
            known, new = parameter.grad, self._new.get(parameter)
            is_zeroed = known is None or (new is not None and not known.any())
            if is_zeroed:  # so the steps before do not count
                self._new.pop(parameter, None)
            elif new is not known:
                before[parameter], parameter.grad = known, None
        try:
            yield
        finally:
            for parameter in tied:
                if parameter not in before:
                    self._note(parameter, parameter.grad)
                elif (added := parameter.grad) is None:
                    parameter.grad = before[parameter]
                else:
                    parameter.grad = before[parameter].add_(added)
                    new = self._new.get(parameter)
                    self._note(parameter, added if new is None else new.add_(added))
        self._versions = {parameter: parameter._version for parameter in tied}
        self.is_complete = False

    def _note(self, parameter: nn.Parameter, new: Tensor | None) -> None:
        if new is not None:
            self._new[parameter] = new

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the new part, which the other rank will know from now on."""
        self._versions.pop(parameter, None)
        return self._new.pop(parameter, None)
