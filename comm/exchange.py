"""Exchange small Python values among all ranks, and make an error of one rank an error of all.

      rank 0    3.5 ──┐             ┌── [3.5, 4.0, 1.2]
      rank 1    4.0 ──┼─ exchange ──┼── [3.5, 4.0, 1.2]
      rank 2    1.2 ──┘             └── [3.5, 4.0, 1.2]

A rank that raised an error alone would leave the others waiting for it. So `on_all` and `on_main` run a
function, exchange the outcomes, and raise on all ranks:

      rank 0    action()  ─── fine ───────┐              ┌── raises "the disk is full"
      rank 1    action()  ─── disk full ──┼── exchange ──┼── raises "the disk is full"
      rank 2    action()  ─── fine ───────┘              └── raises "the disk is full"
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import all_gather
from comm.errors import CommError, LostRank
from comm.wire import slow_link
from comm.wire.groups import Group, is_lost_connection
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason

T = TypeVar("T")


def exchange(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank of `group`, in rank order. All ranks must call it.

    A value is what torch.load accepts with weights_only: numbers, strings, bytes (at least one), tensors, and
    tuples, lists and dicts of these. Tensors arrive on the CPU. (torch's all_gather_object unpickles what it
    receives, and so could run any code.)
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    with slow_link.slowed(None):  # a simulated slow link must not delay this
        sizes = _gathered(torch.tensor([len(mine)], device=device), group).tolist()
        padded = mine.new_zeros(max(sizes))
        padded[: len(mine)] = mine
        everyones = _gathered(padded, group).view(len(sizes), -1).cpu()
    files = (io.BytesIO(row[:size].numpy().tobytes()) for row, size in zip(everyones, sizes, strict=True))
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files]


def _gathered(shard: Tensor, group: Group) -> Tensor:
    full = shard.new_empty(len(shard) * dist.get_world_size(group))
    all_gather(full, shard, group)
    return full


def on_all(what: str, action: Callable[[], T]) -> list[T]:
    """Return what `action` returned on each rank. All ranks call this, and raise if it failed on any.

    The action must return a value that `exchange` accepts. All ranks raise the WorkbookError of the lowest
    rank that failed. An error of another kind becomes a WorkbookError "cannot `what`: ...", and so does a
    lost rank. A rank whose own error is neither a WorkbookError nor an OSError raises that error itself.
    """
    mine: Exception | None = None
    outcome: tuple[Any, str] = None, ""
    try:
        outcome = action(), ""
    except Exception as error:
        mine = error
        outcome = None, str(error) if isinstance(error, WorkbookError) else f"cannot {what}: {reason(error)}"
    with naming_a_lost_rank(what):
        outcomes = exchange(outcome)
    failures = [failure for _, failure in outcomes if failure]
    if not failures:
        return [value for value, _ in outcomes]
    if mine is None or isinstance(mine, OSError | WorkbookError):
        raise WorkbookError(failures[0]) from mine
    raise mine


def on_main(cluster: Cluster, what: str, action: Callable[[], T]) -> T:
    """Return what `action` returned on rank 0, which alone runs it. All raise if it failed there."""
    return on_all(what, lambda: action() if cluster.is_main else None)[0]  # type: ignore[return-value]


@contextmanager
def naming_a_lost_rank(what: str) -> Iterator[None]:
    """Turn the error of a lost connection, or of a timeout, into a LostRank: "cannot `what`: ..."."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorkbookError) and not isinstance(error, CommError):
            raise
        # All ranks raise the same sentence. comm.script adds who has died.
        cause = error.__cause__ if isinstance(error, CommError) else error
        is_late = any(sign in str(cause) for sign in ("imed out", "imeout"))
        if isinstance(error, CommError) and not (is_lost_connection(str(cause)) or is_late):
            raise
        how = "has not answered in time" if is_late else "has died or left"
        raise LostRank(f"cannot {what}: another rank {how}") from cause
