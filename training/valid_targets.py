"""Count the targets that a loss is the mean of, over all ranks: targets of -100 are ignored.

      rank 0   targets  7  3 -100 -100     losses 2.0 1.0           mean of this rank   1.5
      rank 1   targets  5  9    4    2     losses 4.0 4.0 4.0 4.0   mean of this rank   4.0

      one process   (2 + 1 + 4 + 4 + 4 + 4) / 6 = 3.17          mean of the ranks' means   2.75

A mean of means is wrong as soon as ranks, or microbatches, have unequal numbers of valid targets. So each of
the n ranks divides its sum of losses by the same number: the valid targets of the global batch / n. Then the
mean over ranks, which data parallelism takes of gradients, is that of one process.

It is the same with weights of classes, as in `CrossEntropyLoss(weight=w)`, which divides by a sum of weights:

      total = F.cross_entropy(logits, y, weight=w, reduction="sum") / valid_targets(y, weight=w)

A pipeline multiplies the mean of each microbatch by its share of the valid targets. A loss that is another
mean, such as one with weights of classes, is refused.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce
from comm.exchange import exchange
from lab.launch.errors import WorkbookError
from lab.models.model import IGNORED, seeded
from lab.trace.ledger import LEDGER

LossOf = Callable[[Tensor, Tensor], Tensor]


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


def refuse_other_means(loss_of: LossOf, output: Tensor, targets: Sequence[Tensor], group: Group) -> None:
    """Raise WorkbookError, on all ranks of `group`, if a loss is seen to be no mean over valid targets.

    The rank that has the `targets` of the microbatches tries it with random outputs like `output`; the others
    give none. Where these have other rows than the targets, it cannot be tried. What is sent does not count.
    """
    if isinstance(loss_of, nn.Module):
        loss_of = copy.deepcopy(loss_of)  # it may count its calls
    # Small differences show in 32 bits, if the loss takes them. It may also want probabilities.
    dtypes = torch.promote_types(output.dtype, torch.float32), output.dtype
    complaint = ""
    for first, second in pairwise(y for y in targets if y.shape[:1] == output.shape[:1]):
        with seeded(0), torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            for dtype, random in product(dtypes, (torch.randn, torch.rand)):
                with suppress(Exception):  # whatever a loss raises that does not take these outputs
                    outputs = random(2, *output.shape, dtype=dtype).to(first.device)
                    outputs[1] *= 0.1
                    complaint = complaint or _complaint(loss_of, outputs, (first, second))
                    break
    with LEDGER.paused():
        complaints = exchange(complaint, group)
    if sentence := "".join(complaints):
        raise WorkbookError(sentence)


def _complaint(loss_of: LossOf, outputs: Tensor, targets: tuple[Tensor, Tensor]) -> str:
    """Compare the mean of two microbatches with the loss of both; "" if they are equal, or random."""
    counts = [count_valid(part) for part in targets]
    terms = [n * loss_of(x, y) for n, x, y in zip(counts, outputs, targets, strict=True) if n]
    mean = torch.stack(terms).sum() / sum(counts)
    together, again = (loss_of(outputs.flatten(0, 1), torch.cat(targets)) for _ in range(2))
    if not together.isfinite():
        raise ValueError("These outputs are not for this loss.")
    eps = max(torch.finfo(dtype).eps for dtype in (outputs.dtype, mean.dtype))
    if together != again or (together - mean).abs() <= eps ** (2 / 3) * (together.abs() + mean.abs()):
        return ""
    return (
        f"The loss is no mean over valid targets: with random outputs it is {mean:.4g} for two microbatches "
        f"one by one and {together:.4g} for both at once, so gradients would be wrong. Divide a sum by the "
        'number of targets, such as F.cross_entropy(outputs, y, weight=w, reduction="sum") / '
        f"(y != {IGNORED}).sum(), and for the mean over weights call Pipeline.step(x, y, "
        "num_targets=w[y].sum()); a loss that compares the examples of a batch needs all in one microbatch."
    )
