"""Refuse optimizers that cannot train a shard of a parameter, because they look at more than one element."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError


def refuse_unless_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
    """Raise WorkbookError unless the optimizer updates a parameter in two parts as it updates all of it."""
    random = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(3, 4, 6, generator=random, dtype=torch.float64)
    full, halves = (
        nn.Parameter(values.clone()),
        [nn.Parameter(half.clone()) for half in values.view(-1).split([13, 11])],
    )
    try:
        for parameters in ([full], halves):
            optimizer = optimizer_class(parameters, **defaults)
            for gradient in gradients:
                for parameter, part in zip(
                    parameters, gradient.view(-1).split([p.numel() for p in parameters]), strict=True
                ):
                    parameter.grad = part.view_as(parameter).clone()
                optimizer.step()
        is_elementwise = torch.equal(full.view(-1), torch.cat(halves))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise
        is_elementwise = False
    if not is_elementwise:
        raise WorkbookError(
            f"{optimizer_class.__name__} does not work element by element, so it cannot train a shard of a "
            "parameter; take one that does, such as SGD, Adam or AdamW."
        )
