"""Average gradients over ranks in one all-reduce, as wrappers without buckets do after the backward."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, chosen_pattern
from comm.cost import expected_traffic
from lab.trace.ledger import Traffic


def average_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Replace each gradient by the mean over the group. An unused parameter gets a gradient of zeros.

    All ranks must call it with the same parameters. Those that are frozen are left out.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad.as_subclass(Tensor) for parameter in trained if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(flat, "mean", group, pattern=chosen_pattern("all_reduce", group))
    means = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def average_traffic(parameters: Iterable[nn.Parameter], group: Group = None) -> Traffic:
    """Return what this rank sends in `average_gradients`, by formula."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return Traffic()
    numel, pattern = sum(p.numel() for p in trained), chosen_pattern("all_reduce", group)
    return expected_traffic("all_reduce", pattern, numel, trained[0].itemsize, group)
