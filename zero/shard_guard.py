"""Refuse uses of a sharded optimizer that would train nothing, or only a part of the model, without an error.

      in a backward              a parameter was cast: its memory is no longer its bucket's
      in finish_gradient_sync    a parameter was unfrozen, or replaced by another one: no bucket has it
      after a backward           a gradient that was sent to its owner is used: for a local norm, for example

One rank alone may notice one of the first two mistakes. All ranks learn of it in finish_gradient_sync, by an
all-reduce that is needed anyway.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from data_parallel.hook_gradients import HookGradients
from lab.launch.errors import WorkbookError
from zero.replaced import Replacements

ANOTHER_BACKWARD = (
    "Another backward began before finish_gradient_sync() and zero_grad(): run all but the last one inside "
    "no_sync(), and after an error call finish_gradient_sync() and zero_grad()."
)


class TakenGradient(Tensor):
    """A placeholder for a gradient that was sent to the ranks that own it: every use of it is refused."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "TakenGradient":
        kind = {"dtype": parameter.dtype, "device": parameter.device}
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, **kind)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            raise WorkbookError(ANOTHER_BACKWARD)
        raise WorkbookError(
            "In stages 1 and 2 of ZeRO a gradient is sent to the ranks that own it: clip with the "
            "optimizer's own clip_grad_norm_(), and zero with its zero_grad()."
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        raise NotImplementedError("A gradient that was sent to its owner has no memory here.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardGuard:
    """Notices changes of a sharded optimizer's parameters that would make it train wrongly."""

    def __init__(self) -> None:
        self._memory: dict[Tensor, int] = {}
        self._placeholders: dict[Tensor, TakenGradient] = {}
        self._frozen: set[nn.Parameter] = set()
        self._gradients = HookGradients()
        self._replacements = Replacements()
        self._trouble = ""

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note where the parameters are now; those that are frozen are expected to stay so."""
        for parameter in parameters:
            self._replacements.know(parameter)
            if parameter.requires_grad:
                self._memory[parameter] = parameter.data_ptr()
                self._placeholders[parameter] = TakenGradient(parameter)
                self._frozen.discard(parameter)
            else:
                self._frozen.add(parameter)

    def placeholder(self, parameter: Tensor) -> TakenGradient:
        """Return the placeholder for the parameter's gradient, which refuses every use."""
        return self._placeholders[parameter]

    def is_in_place(self, parameter: Tensor) -> bool:
        """Return whether the parameter is still part of its bucket."""
        if parameter.data_ptr() == self._memory[parameter]:
            return True
        self._trouble = (
            f"A parameter of shape {tuple(parameter.shape)} was cast or moved after the optimizer was made: "
            "make the optimizer again."
        )
        return False

    def has_gradient(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a hook's parameter is complete and can be taken."""
        try:
            is_complete = self._gradients.is_complete(parameter)
        except WorkbookError as error:  # the other ranks have to learn of it, too
            self._trouble, parameter.grad = str(error), None
            return False
        return is_complete and self.is_in_place(parameter)

    def has_trouble(self) -> bool:
        """Return whether something is wrong on this rank."""
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            self._trouble = (
                f"A parameter of shape {tuple(unfrozen[0].shape)} was unfrozen after the optimizer was made: "
                "give it to add_param_group()."
            )
        if (place := self._replacements.find()) is not None:
            self._trouble = (
                f"{place} was replaced after the optimizer was made, and would not be trained: give the new "
                "parameters to add_param_group(), or make the optimizer again."
            )
        return bool(self._trouble)

    def refuse_if(self, in_trouble: int) -> None:
        """Raise WorkbookError if any rank is in trouble."""
        trouble, self._trouble = self._trouble, ""
        if in_trouble:
            raise WorkbookError(trouble or "The optimizer of another rank refuses this step: see its error.")
