"""Refuse what needs all of a tensor, where a rank has a shard of it.

An optimizer that divides by the norm of its shard would train something else on each rank. Only what does the
same to a shard as to the full tensor is allowed: operations on a `Shard` by name, optimizers after a trial.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError

# Also allowed: what reads no number (dim), moves numbers (cat), compares two shards (equal), adds a product
# of plain tensors (addmm_ in deferred.py), or works by element, but has a name unknown to aten (__iadd__).
HARMLESS = """
    __get__ __set__ __getitem__ __setitem__ __len__ __repr__ __format__ __deepcopy__ __reduce_ex__ __hash__
    dim size stride numel element_size data_ptr storage_offset untyped_storage get_device as_subclass
    double float half bfloat16 type type_as cpu cuda pin_memory record_stream cat stack copy_ zero_ fill_
    masked_fill_ zeros_like ones_like empty_like new_zeros new_empty addmm_ equal allclose isclose
    backward register_hook retain_grad requires_grad_ _foreach_zero_ _foreach_copy_
    __iadd__ __radd__ __isub__ __rsub__ __imul__ __rmul__ __truediv__ __itruediv__ __rtruediv__ __rdiv__
    __rpow__ __invert__ __and__ __or__
"""
REDUCTIONS = ("max", "min")  # torch's tag is that of max(a, b)


class Shard(Tensor):
    """A rank's part of a gradient or of logits: it refuses operations that need all parts.

    `tensor.as_subclass(Shard)` makes one, and `shard.as_subclass(Tensor)` is a plain tensor again.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_elementwise(func.__name__):
            raise WorkbookError(
                f"{func.__name__}() would see this rank's shard only: clip with the model's own "
                "clip_grad_norm_(), compute the loss with its loss(), or take the plain tensor, "
                "shard.as_subclass(torch.Tensor)."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


@functools.cache
def is_elementwise(name: str) -> bool:
    """Return whether a function does the same to a part of a tensor as to all of it.

    torch says so of its operations: by the tag `pointwise`, or by a schema whose result is a view.
    """
    if name in HARMLESS.split() or name.startswith(("is_", "_fused_")):  # a fused optimizer had its trial
        return True
    plain = name.removeprefix("_foreach_").strip("_")
    operation = getattr(torch.ops.aten, plain, None)
    overloads = [getattr(operation, one) for one in operation.overloads()] if operation else []
    results = [one._schema.returns[0].alias_info for one in overloads if one._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in results)
    is_pointwise = plain not in REDUCTIONS and any(torch.Tag.pointwise in one.tags for one in overloads)
    return is_view or is_pointwise


def refuse_unless_elementwise(optimizer_class: type[Optimizer], options: dict[str, Any]) -> None:
    """Raise WorkbookError unless the optimizer updates a parameter in two parts as it updates all of it."""
    known = inspect.signature(optimizer_class).parameters
    options = {name: value for name, value in options.items() if name in known}
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

    try:
        is_elementwise = torch.equal(trained([24], (4, 6)), trained([13, 11], (1, -1)))
    except (TypeError, ValueError, RuntimeError):  # such as Muon, which takes matrices only
        is_elementwise = False
    if not is_elementwise:
        raise WorkbookError(
            f"{optimizer_class.__name__} does not work element by element, so it cannot train a shard of a "
            "parameter: take one that does, such as SGD, Adam or AdamW."
        )
