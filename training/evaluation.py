"""Compute the loss on held-out data, and the mean loss of a step: the same on any number of ranks.

      rank 0   slice 0 ─► outputs ─► sum of losses, right answers ─┐
      rank 1   slice 1 ─► outputs ─► sum of losses, right answers ─┼─ all-reduce, sum ─► / tokens
      rank 2   slice 2 ─► outputs ─► sum of losses, right answers ─┘

Ranks add sums, not means: so it does not matter which rank has which example, or that some have none.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import all_reduce
from lab.launch.errors import WorkbookError
from lab.trace.ledger import LEDGER
from training.data import TrainingData

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
    batches: Iterable[Iterable[Tensor]],
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


def mean_of_losses(loss: Tensor | None, device: torch.device, pattern: str) -> Tensor:
    """Return the mean of the losses of the ranks that have one. All ranks must call it."""
    sum_and_number = torch.zeros(2, device=device)
    if loss is not None:
        sum_and_number[0], sum_and_number[1] = loss, 1
    all_reduce(sum_and_number, pattern=pattern)
    if not sum_and_number[1]:
        raise WorkbookError("No rank has a loss of this step: call run.record(loss) in the loop.")
    return sum_and_number[0] / sum_and_number[1]


class Evaluation:
    """Computes the loss of a run's model on held-out data, and has the `figures` of the last time.

    `own_slice` returns this rank's part of a batch's x, y or counts.
    """

    def __init__(
        self, data: TrainingData, own_slice: Callable[[Tensor], Tensor], device: torch.device, pattern: str
    ) -> None:
        self._data, self._own_slice, self._device, self._pattern = data, own_slice, device, pattern
        self._bytes_sent = 0
        self.figures: dict[str, float] = {}

    def measure(self, model: Any) -> float:
        """Return the loss. What this rank sends for it is counted apart from the training's."""
        batches = (map(self._own_slice, batch) for batch in self._data.held_out())
        sums = getattr(model, "evaluation_sums", lambda x, y, counts: sums_of(model(x), y, counts))
        before = LEDGER.total()
        with evaluating(model):
            loss, right = held_out_means(
                batches, sums, self._data.held_out_tokens, self._device, self._pattern
            )
        self._bytes_sent += (LEDGER.total() - before).bytes_sent
        self.figures = {"validation_loss": loss, "validation_bytes_sent": self._bytes_sent}
        if not self._data.is_text:
            self.figures["validation_accuracy"] = right
        return loss
