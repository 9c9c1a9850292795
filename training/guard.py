"""Refuse, in one sentence, the uses of a wrapper that would train wrongly without an error.

      at wrapping        a layer has sparse gradients, or an optimizer looks at more than one number at a time
      in a forward       a parameter was added, replaced, frozen or cast after wrapping: no hook, no shard
      in a backward      the gradients of the backward before it are still being sent
      before a step      finish_gradient_sync() was forgotten: each rank has gradients of its own

All ranks run the same program, so they make the same mistake, and each rank notices it without the others.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError

SPARSE = "has sparse gradients, which have another size on each rank: leave sparse=True out."


class Guard:
    """Watches how a wrapper of `module` is used: the wrapper reports forwards, gradients and their mean.

    A wrapper that has parameters but no module passes nn.ParameterList(parameters).
    """

    def __init__(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            is_sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
            if is_sparse and layer.weight.requires_grad:
                raise WorkbookError(f"{name or type(layer).__name__} {SPARSE}")
        self.is_synchronising = True  # False inside no_sync()
        self._module, self._kept = module, list(module.parameters())  # kept, so that no id() is used twice
        self._wrapped = self._parameters()
        self._arrived: set[Tensor] = set()

    def _parameters(self) -> dict[str, tuple[Any, ...]]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: (id(p), p.requires_grad, p.dtype, p.device) for name, p in named}

    def before_forward(self) -> None:
        """Raise WorkbookError if the module has other parameters than when it was wrapped."""
        now = self._parameters() if torch.is_grad_enabled() else self._wrapped
        changed = [name for name in self._wrapped | now if self._wrapped.get(name) != now.get(name)]
        if changed:
            raise WorkbookError(
                f"{changed[0]} was added, removed, replaced, frozen, unfrozen, cast or moved after wrapping, "
                "and would not be trained as on one process: change the module first, then wrap it."
            )

    def note_arrival(self, parameter: Tensor) -> bool:
        """Note that the parameter's gradient has arrived; return False if autograd's result was None.

        Call it in the hook of `parameter`. It refuses a second backward that adds to what is being sent.
        """
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.layout != torch.strided:
            raise WorkbookError(f"A parameter of shape {tuple(parameter.shape)} {SPARSE}")
        if parameter in self._arrived:
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): run all but the last one inside "
                "no_sync(); after an error, call finish_gradient_sync() and zero_grad()."
            )
        if self.is_synchronising:
            self._arrived.add(parameter)
        return True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the backwards of all microbatches but the last: their gradients add up."""
        self.is_synchronising = False
        try:
            yield
        finally:
            self.is_synchronising = True

    def expect_gradients(self) -> None:
        """Prepare for the next backward: none of its gradients has arrived."""
        self._arrived.clear()

    def before_step(self) -> None:
        """Raise WorkbookError if the gradients of a backward have not been averaged yet."""
        if self._arrived:
            raise WorkbookError("Call finish_gradient_sync() after the last backward, and before step().")


def refuse_unless_elementwise(optimizer_class: type[Optimizer], options: dict[str, Any]) -> None:
    """Raise WorkbookError unless the optimizer updates a parameter in two parts as it updates all of it."""
    random = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(3, 24, generator=random, dtype=torch.float64)

    def trained(sizes: list[int], shape: tuple[int, ...]) -> Tensor:
        """Return the values after two steps, as parameters of these sizes."""
        parts = [nn.Parameter(part.clone().view(shape)) for part in values.split(sizes)]
        optimizer = optimizer_class(parts, **options)
        for gradient in gradients:
            for part, its_gradient in zip(parts, gradient.split(sizes), strict=True):
                part.grad = its_gradient.clone().view(shape)
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    optimizer_class([nn.Parameter(values.view(4, 6))], **options)  # raises its own error for a wrong option
    try:
        is_elementwise = torch.equal(trained([24], (4, 6)), trained([13, 11], (-1,)))
    except (TypeError, ValueError, RuntimeError):  # such as Muon, which takes matrices only
        is_elementwise = False
    if not is_elementwise:
        raise WorkbookError(
            f"{optimizer_class.__name__} does not work element by element, so it cannot train a shard of a "
            "parameter: take one that does, such as SGD, Adam or AdamW."
        )
