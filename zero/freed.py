"""Free the memory of parameters without breaking what refers to it: autograd's graph, and user code.

      forward       parameter ── saved for the backward ──► Note(unit, place)
      free          parameter becomes a Freed, with shape, dtype and device, but no memory of its own
      used          Freed ──► gathered if a forward or backward needs it, else one clear error
      backward      Note ──► the unit is gathered, and the note becomes the view that was saved

The data of a freed parameter are one number of the shard, expanded to the shape of the parameter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lab.launch.errors import WorkbookError


class Gathers(Protocol):
    """An object that gathers parameters into `full`: a unit. An optimizer step changes `shard._version`."""

    full: Tensor | None
    shard: Tensor

    def gather(self) -> None: ...


# Functions that need no numbers. `new_zeros` and the like use only the dtype and the device.
_KNOWN = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_ones,
    Tensor.new_tensor,
    Tensor.new_zeros,
    Tensor.numel,
    Tensor.size,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_leaf", "is_cuda", "is_cpu", "is_sparse", "requires_grad")
    ),
}


class Freed(nn.Parameter):
    """A parameter of which only shards exist. A function that needs its numbers calls `on_touch` first."""

    on_touch: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) is Freed:
                leaf.on_touch()
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Freed(shape={tuple(self.shape)}, dtype={self.dtype})"


def stand_in(shard: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a tensor of the given dtype and shape that only uses the memory of the shard's first number."""
    if shard.nbytes < dtype.itemsize:
        return torch.zeros((), dtype=dtype, device=shard.device).expand(shape)
    nothing = torch.empty(0, dtype=dtype, device=shard.device)
    return nothing.set_(shard.untyped_storage(), 0, shape, [0] * len(shape))


def free(parameter: nn.Parameter, data: Tensor) -> None:
    """Replace the data of the parameter by `data`, its stand-in, so that its memory can be freed."""
    parameter.data = data
    parameter.__class__ = Freed


def fill_in(parameter: nn.Parameter, data: Tensor, requires_grad: bool) -> None:
    """Make `data` the data of the parameter again."""
    parameter.__class__ = nn.Parameter
    parameter.data = data
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
    """Call `hook` in each backward when the gradient of the parameter, freed or not, is complete."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.register_post_accumulate_grad_hook(hook)


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient of a parameter, freed or not, and set it to None."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    return gradient


def is_in_a_backward() -> bool:
    """Return whether a backward is running; a forward inside one recomputes activations."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class Note:
    """The place of a saved tensor in the memory of its unit, and the version that the shard had."""

    unit: Gathers
    shard_version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def view(self) -> Tensor:
        """Gather the unit, and return the tensor that was saved."""
        if self.unit.shard._version != self.shard_version:
            raise WorkbookError(
                "The parameters have changed since the forward of this backward: run the backward before "
                "the optimizer's step, or the forward again after it."
            )
        self.unit.gather()
        assert self.unit.full is not None
        nothing = torch.empty(0, dtype=self.dtype, device=self.unit.full.device)
        view = nothing.set_(self.unit.full.untyped_storage(), self.offset, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return view._neg_view() if self.is_neg else view


class Notes(torch.autograd.graph.saved_tensors_hooks):
    """A context in which autograd saves notes of gathered parameters, so that their memory can be freed.

    `units` are those that are full, by the address of their memory. `before_use` is called in the backward
    before a unit is gathered for a note. Other tensors are saved as usual: by the hooks around this
    context, or as they are, with a check that they were not changed in place.
    """

    def __init__(self, units: Mapping[int, Gathers], before_use: Callable[[], None]) -> None:
        super().__init__(self._pack, self._unpack)
        self._units, self._before_use = units, before_use

    def __enter__(self) -> None:
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Any:
        unit = self._units.get(tensor.untyped_storage().data_ptr()) if _has_memory(tensor) else None
        if unit is not None:
            place = tensor.shape, tensor.stride(), tensor.storage_offset()
            return Note(unit, unit.shard._version, tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor.detach(), tensor._version  # detached: a node that saves its own result would be a cycle

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Note):
            self._before_use()
            return saved.view()
        if self._outer is not None:
            return self._outer[1](saved)
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; "
                f"expected version {version} instead"
            )
        return tensor


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
