"""Gradients of one rank's tokens. Write `TensorParallel._with_own_tokens_only` and
`TensorParallel.finish_gradient_sync` of tensor_parallel/parallel_model.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/parallel_model.py
yet: it contains the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.
    GradientPart(group: Group, pattern: str | None)
        This rank's part of a gradient.
    GradientPart.of(part: Tensor, group: Group, pattern: str | None) -> 'GradientPart'
        Return `part`, in the same memory, as a part of what the group has.
    self._partial.completing(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]
        Yield the gradients that are incomplete; the caller must add each up over the ranks, in place.
    self._partial: PartialGradients
    self._pattern
    self.dims: dict[str, tuple[int, int]]
        The same by name.
    self.group: Group
    self.module: nn.Module
    self.sequence_parallel: bool

Check it with `python -m exercises check sequence_parallel`.
"""

import torch
from torch import Tensor, nn

from comm.collectives import all_reduce
from training.gradient_part import GradientPart


def _with_own_tokens_only(self) -> list[nn.Parameter]:
    """Return the parameters whose gradient on this rank comes from this rank's tokens only.

    `self.dims` has the names of the parameters that are divided among the ranks. `self.module` names
    its parameters as they are in `self.dims`.
    """
    raise NotImplementedError(
        "Gradients of one rank's tokens is not written yet: `TensorParallel._with_own_tokens_only` has no "
        "body."
    )


def finish_gradient_sync(self) -> None:
    """Add up the gradients of which each rank has one term, from all backwards since the last call.

    `with self._partial.completing(parameters) as gradients` gives the gradients of these
    parameters that are not complete, as a list of tensors, to be changed in place. Reduce them
    all in one message, over `self.group` with `self._pattern`. Afterwards let the grad of each
    divided parameter that is a plain Tensor become GradientPart.of(grad, self.group,
    self._pattern), so that torch's own tools see the gradient of all ranks.
    """
    raise NotImplementedError(
        "Gradients of one rank's tokens is not written yet: `TensorParallel.finish_gradient_sync` has no "
        "body."
    )
