"""Parameters whose memory was given back, and what autograd keeps of them: no access meets lost memory.

      forward       parameter ── saved for the backward ──► Note(unit, place)
      free          parameter becomes a Freed: its shape, dtype and device are known
      touched       Freed ──► gathered where a forward or backward needs it, else an error in a sentence
      backward      Note ──► gathered, and the view that was saved

A freed parameter's data are a number of the shard, seen in the parameter's shape: that costs no memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lab.errors import WorkbookError


class Gathers(Protocol):
    """Owns parameters, and gathers them into `full`; the shard's version counts optimizer steps."""

    full: Tensor | None
    shard: Tensor

    def gather(self) -> None: ...


# What can be said without memory; `new_zeros` and its like take no more than a dtype and a device.
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
    """A parameter while only shards of it exist. Whatever needs its numbers calls its `on_touch` first."""

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
    """Return a tensor of that dtype and shape in the memory of the shard's first number."""
    if shard.nbytes < dtype.itemsize:
        return torch.zeros((), dtype=dtype, device=shard.device).expand(shape)
    nothing = torch.empty(0, dtype=dtype, device=shard.device)
    return nothing.set_(shard.untyped_storage(), 0, shape, [0] * len(shape))


def free(parameter: nn.Parameter, data: Tensor) -> None:
    """Let go of the parameter's memory; `data` is its stand-in."""
    parameter.data = data
    parameter.__class__ = Freed


def fill_in(parameter: nn.Parameter, data: Tensor, requires_grad: bool) -> None:
    """Give the parameter its numbers."""
    parameter.__class__ = nn.Parameter
    parameter.data = data
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
    """Call `hook` when the gradient of a parameter, freed or not, is complete."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.register_post_accumulate_grad_hook(hook)


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd has left in a parameter, freed or not, and leave none."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    return gradient


def is_in_a_backward() -> bool:
    """Return whether autograd is at work: what runs a forward then recomputes activations."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class Note:
    """Notes where in its unit's memory a saved tensor was, and how often the shard had changed."""

    unit: Gathers
    shard_version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def view(self) -> Tensor:
        """Gather the unit, and return what was saved."""
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
    """Within it, autograd saves notes of gathered parameters instead of their memory.

    `units` are those that are full, by the address of their memory; `before_use` is called before one is
    gathered for the backward. Everything else is saved as it would be without: by the hooks around this one,
    or as it is, with a look whether it was changed since.
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
