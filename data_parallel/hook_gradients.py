"""Tell which gradients are complete when the hook of their parameter is called, and refuse sparse ones."""

import torch
from torch import Tensor

from lab.launch.errors import WorkbookError

NO_SPARSE = (
    "it has another size on each rank, so it cannot be averaged here; leave sparse=True out, or take torch's "
    "DistributedDataParallel."
)


class HookGradients:
    """Remembers the parameters whose hook was called without a gradient.

    Autograd does that where a backward returns None for the parameter. If its gradient is computed later
    (pipeline_parallel.deferred), no hook is called: such a gradient is complete at the end only.
    """

    def __init__(self) -> None:
        self._deferred: set[Tensor] = set()

    def is_complete(self, parameter: Tensor) -> bool:
        """Return whether a hook's parameter has its complete gradient; refuse a sparse one."""
        gradient = parameter.grad
        if gradient is None:
            self._deferred.add(parameter)
        elif gradient.layout != torch.strided:
            raise WorkbookError(f"A sparse gradient of shape {tuple(gradient.shape)} came: {NO_SPARSE}")
        return parameter not in self._deferred
