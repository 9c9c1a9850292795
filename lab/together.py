"""Make what goes wrong on one rank an error on all: one that raised alone would leave the others waiting.

rank 0    action()  ─── fine ───────┐             ┌── raises "the disk is full"
rank 1    action()  ─── disk full ──┤  each rank  ├── raises "the disk is full"
rank 2    action()  ─── fine ───────┘  tells all  └── raises "the disk is full"
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.errors import WorkbookError

T = TypeVar("T")


def on_all(what: str, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what `action` returned on each rank of `group`. All call it, and raise if it failed on any.

    It returns what torch.load takes with weights_only: numbers, texts, bytes, tensors, and tuples, lists and
    dicts of these. They raise a WorkbookError, the first rank's. An error of the operating system becomes one
    that says "cannot `what`: ...", as does a rank that is gone; a rank where any other came up raises that.
    """
    mine: Exception | None = None
    outcome: tuple[Any, str] = None, ""
    try:
        outcome = action(), ""
    except Exception as error:
        mine = error
        outcome = None, str(error) if isinstance(error, WorkbookError) else f"cannot {what}: {reason(error)}"
    with lost_rank_in_a_sentence(what):
        outcomes = _exchanged(outcome, group)
    failures = [failure for _, failure in outcomes if failure]
    if not failures:
        return [value for value, _ in outcomes]
    if mine is None or isinstance(mine, OSError | WorkbookError):
        raise WorkbookError(failures[0]) from mine
    raise mine


def on_main(cluster: Cluster, what: str, action: Callable[[], T]) -> T:
    """Return what `action` returned on rank 0, which alone calls it. All raise if it failed there."""
    return on_all(what, lambda: action() if cluster.is_main else None)[0]  # type: ignore[return-value]


@contextmanager
def lost_rank_in_a_sentence(what: str) -> Iterator[None]:
    """Let what torch.distributed raises where a rank has died be a WorkbookError: "cannot `what`: ..."."""
    try:
        yield
    except WorkbookError:
        raise
    except RuntimeError as error:
        how = "has not answered in time" if "imed out" in str(error) else "has died or left"
        raise WorkbookError(f"cannot {what}: another rank {how}") from error


def _exchanged(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value. Not all_gather_object, which unpickles whatever comes over the network."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded, group)
    files = (
        io.BytesIO(one[: int(size)].cpu().numpy().tobytes())
        for one, size in zip(everyones, sizes, strict=True)
    )
    return [torch.load(file, weights_only=True) for file in files]


def reason(error: BaseException) -> str:
    """Return what an error says in its first line, without its number or its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
