"""Count the targets that a loss is the mean of, over all ranks: targets of -100 are ignored.

      rank 0   targets  7  3 -100 -100     losses 2.0 1.0           mean of this rank   1.5
      rank 1   targets  5  9    4    2     losses 4.0 4.0 4.0 4.0   mean of this rank   4.0

      one process   (2 + 1 + 4 + 4 + 4 + 4) / 6 = 3.17          mean of the ranks' means   2.75

A mean of means is wrong as soon as ranks, or microbatches, have unequal numbers of valid targets. So each of
the n ranks divides its sum of losses by the same number: the valid targets of the global batch / n. Then the
mean over ranks, which data parallelism takes of gradients, is that of one process.

It is the same with weights of classes, as in `CrossEntropyLoss(weight=w)`, which divides by a sum of weights:

      total = F.cross_entropy(logits, y, weight=w, reduction="sum") / valid_targets(y, weight=w)
"""

import torch
from torch import Tensor

from comm.collectives import Group, all_reduce
from lab.launch.errors import WorkbookError
from lab.models.model import IGNORED


def is_valid(targets: Tensor) -> Tensor:
    """Return for each target whether it counts, as bools. Targets that are not classes all count."""
    return torch.ones_like(targets, dtype=torch.bool) if targets.is_floating_point() else targets != IGNORED


def count_valid(targets: Tensor) -> int:
    """Return the number of targets that count."""
    return int(is_valid(targets).sum())


def valid_targets(
    targets: Tensor, group: Group = None, pattern: str | None = None, weight: Tensor | None = None
) -> float:
    """Return the mean over the ranks of `group` of the number of valid targets that each rank has in a step.

    Give it the targets of all microbatches, and give the result to `loss_of` for each of them. With the
    `weight` of each class it is the sum of the targets' weights. All ranks call it, before the forward: it is
    an all-reduce of one number. Raise WorkbookError, on all ranks, if there is no valid target.
    """
    own = count_valid(targets) if weight is None else float(weight[targets[is_valid(targets)]].sum())
    number = torch.tensor([own], dtype=torch.float64, device=targets.device)
    all_reduce(number, op="mean", group=group, pattern=pattern)
    if not number:
        raise WorkbookError(f"All targets of this step are {IGNORED}: there is nothing to train on.")
    return number.item()
