"""Stop a training that diverges before it spoils its weights: where a gradient or the loss is inf or NaN."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError

CURE = (
    "The training diverges: take a smaller --lr, or clip the gradients (--clip) where the script can. "
    "To continue anyway: --allow-nonfinite."
)


def not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor in which a number is inf or NaN, or None if all are finite."""
    local = [
        (name, t.to_local() if isinstance(t, DTensor) else t.detach().as_subclass(Tensor))
        for name, t in named
    ]
    local = [(name, tensor) for name, tensor in local if tensor.is_floating_point() and tensor.numel()]
    # The norm of all is one kernel for many tensors, and one number to look at.
    if not local or torch.nn.utils.get_total_norm([tensor for _, tensor in local], math.inf).isfinite():
        return None
    return next(name for name, tensor in local if not tensor.isfinite().all())


def refuse_not_finite(model: Any, optimizer: Optimizer, step: int, rank: int) -> None:
    """Raise WorkbookError before a step of the optimizer whose gradients are not finite."""
    if (name := not_finite(gradients_by_name(model, optimizer))) is not None:
        raise WorkbookError(f"The gradient of {name} is not finite in step {step} on rank {rank}. {CURE}")


def gradients_by_name(model: Any, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    """Yield the gradients that the optimizer is about to use, with the names of their parameters."""
    plain = getattr(model, "module", model)
    named = getattr(model, "named_own_parameters", lambda: dict(plain.named_parameters()))()
    names = {parameter: name.removeprefix("module.") for name, parameter in named.items()}
    for holder in (model, optimizer, getattr(model, "data", None)):
        for shard in getattr(holder, "parameter_shards", ()):
            names[shard.tensor] = names.get(shard.parameter, "a parameter")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield names.get(parameter, "a parameter"), parameter.grad
