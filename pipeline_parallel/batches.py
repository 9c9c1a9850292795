"""Divide a batch into microbatches of the size of the example, or raise an error that says why not."""

import torch
from torch import Tensor

from lab.launch.errors import WorkbookError


def microbatches_of_input(x: Tensor | None, count: int, like: Tensor) -> list[Tensor]:
    """Divide `x` into parts like `like`. The parts require gradients if `x` does."""
    parts = _divided("x", "first", x, count)
    if (parts[0].shape, parts[0].dtype) != (like.shape, like.dtype):
        raise WorkbookError(
            f"A microbatch is {list(parts[0].shape)} of {parts[0].dtype}, but the pipeline was made for "
            f"{list(like.shape)} of {like.dtype}: give Pipeline an example like this microbatch, or change "
            "the batch (a DataLoader's last batch is smaller without drop_last=True)."
        )
    return parts


def microbatches_of_targets(y: Tensor | None, count: int, rows: int | None) -> list[Tensor]:
    """Divide the targets into parts of `rows` rows each; None allows any number."""
    parts = _divided("y", "last", y, count)
    if rows is not None and len(parts[0]) != rows:
        raise WorkbookError(
            f"y has {count * len(parts[0])} rows, but the pipeline was made for x and y of {count * rows}, "
            f"in {count} microbatches (a DataLoader's last batch is smaller without drop_last=True)."
        )
    return parts


def validated_loss(loss: Tensor) -> Tensor:
    """Return the loss that loss_of has returned. WorkbookError unless it is one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    given = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise WorkbookError(f"loss_of must return one number, the mean over a microbatch, but returned {given}.")


def refuse_without_gradients() -> None:
    """Raise WorkbookError under torch.no_grad() and torch.inference_mode()."""
    if not torch.is_grad_enabled():
        raise WorkbookError(
            "A pipeline's step computes gradients, which torch.no_grad() forbids: call step(x, y) outside of "
            "it. To evaluate, call evaluate(x, y) for the loss, or forward_only(x) for the outputs."
        )


def _divided(name: str, stage: str, batch: Tensor | None, count: int) -> list[Tensor]:
    if batch is None:
        raise WorkbookError(f"The rank of the {stage} stage needs {name}, and got None.")
    if not isinstance(batch, Tensor) or not batch.dim():
        given = f"a {type(batch).__name__}" if not isinstance(batch, Tensor) else "one without rows"
        raise WorkbookError(
            f"A pipeline takes {name} as one tensor with a row for each example, not {given}."
        )
    if len(batch) % count or not len(batch):
        raise WorkbookError(
            f"A batch of {len(batch)} cannot be divided into {count} equal microbatches "
            "(a DataLoader's last batch is smaller without drop_last=True)."
        )
    return [part.requires_grad_(batch.requires_grad) for part in batch.detach().chunk(count)]
