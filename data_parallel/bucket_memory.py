"""Allocate buckets in this rank's own memory, or in memory that all ranks of a machine share.

Buckets in shared memory can be reduced in place (comm/algorithms/in_place.py). That memory is made once, for
the gradients of all parameters. Buckets that are made again, in another order, lie in the same memory.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm import shared_tensors
from comm.wire.wire import Group
from lab.launch.errors import WorkbookError


class OwnMemory:
    """Memory of this rank alone, on the device of the parameters."""

    def reuse(self, parameters: list[nn.Parameter]) -> None:
        """Do nothing: new buckets get new memory."""

    def zeros(self, numel: int, example: Tensor) -> Tensor:
        """Return a flat tensor of `numel` zeros, of the dtype and on the device of `example`."""
        return torch.zeros(numel, dtype=example.dtype, device=example.device)


OWN_MEMORY = OwnMemory()


class SharedMemory(OwnMemory):
    """Memory that the ranks of `group` share, for the gradients of these parameters and a flag for each.

    All ranks must create it together. Raise WorkbookError, on all of them, where they cannot share memory.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: Group, wire_dtype: torch.dtype | None = None
    ) -> None:
        if wire_dtype is not None:
            raise WorkbookError(
                "Gradients that the ranks share are not sent: --in-place and --wire-dtype exclude each other."
            )
        if any(parameter.device.type != "cpu" for parameter in parameters):
            raise WorkbookError(
                "Gradients that the ranks share must be in host memory: leave out --in-place on a GPU."
            )
        sizes: dict[torch.dtype, int] = {}
        for parameter in parameters:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, len(parameters)) + parameter.numel()
        self._memory = {dtype: shared_tensors.zeros(n, dtype, group) for dtype, n in sizes.items()}
        self._free = dict(self._memory)
        is_shared = all(shared_tensors.are_shared(memory, group) for memory in self._memory.values())
        if dist.get_world_size(group) > 1 and not is_shared:
            raise WorkbookError(
                "The ranks cannot share memory: --in-place needs ranks of one Linux machine, outside of "
                "containers."
            )

    def reuse(self, parameters: list[nn.Parameter]) -> None:
        """Let `zeros` start at the beginning of the memory. Gradients that lie there are copied first."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._free = dict(self._memory)

    def zeros(self, numel: int, example: Tensor) -> Tensor:
        """Return the next `numel` elements of the memory for this dtype, filled with zeros."""
        taken, self._free[example.dtype] = self._free[example.dtype].tensor_split([numel])
        return taken.zero_()
