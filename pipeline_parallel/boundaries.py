"""Agree on the stages of a pipeline before it begins, and exchange the boundaries between them.

Boundary s is the input of stage s; the last boundary is the output of the last stage. A tensor without
memory (device "meta") describes its shape and dtype. Each stage receives the description of its input from
the stage before, and sends that of its output to the stage after. If something is wrong on one rank, all
ranks raise.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.exchange import on_all
from comm.point_to_point import recv, send
from comm.wire.handshake import DTYPES
from comm.wire.wire import Group
from lab.launch.errors import WorkbookError, reason
from pipeline_parallel.actions import Table, placement
from pipeline_parallel.split import costs_of, cut, measured_costs, split_as_given
from pipeline_parallel.stage import Part, Stage, as_sequential, parts_of

MAX_DIMS = 8
NO_OUTPUT = -1


def agreed_stages(
    model: nn.Module | Sequence[nn.Module],
    table: Table,
    example: Tensor,
    costs: Sequence[float] | str | None,
    split: Sequence[int] | None,
    group: Group,
) -> tuple[nn.Module, list[Stage]]:
    """Return the model and all its stages. WorkbookError on all ranks unless all make the same pipeline."""
    agreed: list[tuple[nn.Module, list[Part]]] = []
    num_stages, is_timed = len(placement(table)), isinstance(costs, str) and costs == "time"

    def ranges(costs: Sequence[float] | str | None) -> list[range]:
        full, parts = agreed[0]
        if split is not None:
            return split_as_given(len(parts), split, num_stages)
        return cut(costs_of(full, parts, costs), num_stages)

    def digest() -> str:
        validate_table_and_example(table, example, group)
        full = as_sequential(model)
        agreed.append((full, parts_of(full)))
        ranges(None if is_timed else costs)  # raises if costs or split do not fit
        names = [part.modules for part in agreed[0][1]]
        sizes = [(name, tensor.shape, tensor.dtype) for name, tensor in full.state_dict().items()]
        given = [each if isinstance(each, str | None) else list(each) for each in (costs, split)]
        return hashlib.sha256(repr((table, names, sizes, given)).encode()).hexdigest()

    if len(set(on_all("make the pipeline", digest, group))) > 1:
        raise WorkbookError(
            "The ranks make different pipelines: give the same model, schedule, costs and split on all ranks."
        )
    full, parts = agreed[0]
    if is_timed and split is None:  # on one rank, so that all ranks cut the model in the same way
        is_first = placement(table)[0] == dist.get_rank(group)
        costs = max(
            on_all("measure", lambda: measured_costs(full, example) if is_first else [], group), key=len
        )
    return full, [Stage(full, [parts[i] for i in of_stage]) for of_stage in ranges(costs)]


def validate_table_and_example(table: Table, example: Tensor, group: Group) -> None:
    """Refuse a schedule that is not for these ranks, and an example that is not one tensor."""
    if len(table) != dist.get_world_size(group):
        ranks = dist.get_world_size(group)
        raise WorkbookError(f"The schedule is for {len(table)} ranks, and there are {ranks}.")
    if not isinstance(example, Tensor) or not example.dim() or example.dim() > MAX_DIMS:
        given = type(example).__name__ if not isinstance(example, Tensor) else f"{example.dim()} dims"
        raise WorkbookError(
            f"`example` must be a microbatch of the input: one tensor of 1 to {MAX_DIMS} dims, not {given}."
        )


def exchange_boundaries(
    stages: Mapping[int, Stage], rank_of: Mapping[int, int], example: Tensor, group: Group
) -> tuple[dict[int, Tensor], int]:
    """Return the boundaries of this rank's `stages`, and how many examples a microbatch has.

    The shape and dtype of `example` matter only on the rank of the first stage. WorkbookError on all ranks if
    a stage cannot take its input, or does not return one tensor. If another stage follows, the dtype of that
    tensor must allow a gradient.
    """
    rank, device = dist.get_rank(group), example.device
    likes: dict[int, Tensor | None] = {}
    failures: list[WorkbookError] = []
    for stage in sorted(stages):
        if stage == 0:
            likes[0] = example.to("meta")
        elif stage not in likes:
            likes[stage] = _receive_like(rank_of[stage - 1], device, group)
        given, likes[stage + 1] = likes[stage], None
        if given is not None:
            try:
                likes[stage + 1] = _output_like(stages[stage], stage, given, stage + 1 < len(rank_of))
            except WorkbookError as error:
                failures.append(error)
        if (follower := rank_of.get(stage + 1, rank)) != rank:
            _send_like(likes[stage + 1], follower, device, group)

    def rows() -> int:
        if failures:
            raise failures[0]
        return len(example)

    of_ranks = on_all("make a stage", rows, group)
    return {boundary: like for boundary, like in likes.items() if like is not None}, of_ranks[rank_of[0]]


def _output_like(stage: Stage, index: int, given: Tensor, is_followed: bool) -> Tensor:
    try:
        made = stage.output_like(given)
    except Exception as error:
        raise WorkbookError(
            f"Stage {index} cannot take its input, {list(given.shape)} of {given.dtype}: {reason(error)}"
        ) from error
    if not isinstance(made, Tensor) or made.dim() > MAX_DIMS:
        made_name = f"one of {made.dim()} dims" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise WorkbookError(
            f"A stage must return one tensor of at most {MAX_DIMS} dims, but stage {index} returns "
            f"{made_name}."
        )
    if is_followed and not (made.is_floating_point() or made.is_complex()):
        raise WorkbookError(
            f"Stage {index} returns a tensor of {made.dtype}, which has no gradient: cut the model elsewhere."
        )
    return made


def _send_like(like: Tensor | None, peer: int, device: torch.device, group: Group) -> None:
    numbers = [NO_OUTPUT] * (2 + MAX_DIMS)
    if like is not None:
        numbers = [DTYPES.index(like.dtype), like.dim(), *like.shape, *[0] * (MAX_DIMS - like.dim())]
    send(torch.tensor(numbers, device=device), peer, group)


def _receive_like(peer: int, device: torch.device, group: Group) -> Tensor | None:
    numbers = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=device)
    recv(numbers, peer, group)
    dtype, dims, *shape = numbers.tolist()
    if dtype == NO_OUTPUT:
        return None
    return torch.empty(shape[:dims], dtype=DTYPES[dtype], device="meta")
