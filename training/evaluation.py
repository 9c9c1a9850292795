"""Compute the loss on held-out data: the same number in every mode, on any number of ranks.

      rank 0   slice 0 ─► outputs ─► sum of losses, right answers ─┐
      rank 1   slice 1 ─► outputs ─► sum of losses, right answers ─┼─ all-reduce, sum ─► / tokens
      rank 2   slice 2 ─► outputs ─► sum of losses, right answers ─┘

Ranks add sums, not means: so it does not matter which rank has which example, or that some have none.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import all_reduce

Sums = Tensor  # float64: the sum of losses, the number of right answers


def sums_of(outputs: Tensor, y: Tensor, counts: Tensor) -> Sums:
    """Return the sums over the examples that count. `outputs` are logits, a row for each token of `y`."""
    counted = counts.view(-1, *[1] * (y.dim() - 1)).expand_as(y)
    losses = F.cross_entropy(outputs.float().flatten(0, -2), y.flatten(), reduction="none").view_as(y)
    right = outputs.argmax(dim=-1) == y
    return torch.stack([losses.double()[counted].sum(), right[counted].double().sum()])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, without gradients, and restore each submodule's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def held_out_means(
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    sums: Callable[[Tensor, Tensor, Tensor], Sums | None],
    tokens: int,
    device: torch.device,
    pattern: str,
) -> tuple[float, float]:
    """Return the mean loss and the share of right answers over all `tokens` of the batches of all ranks.

    `sums` is called with this rank's slice of each batch. It returns None on ranks whose answers another
    rank counts.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        mine = sums(*batch)
        if mine is not None:
            total += mine
    all_reduce(total, pattern=pattern)
    loss, right = (total / tokens).tolist()
    return loss, right
