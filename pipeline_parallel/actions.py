"""Describe what a rank of a pipeline does, action by action, before anything runs.

    F3   forward of microbatch 3              B3   its backward
    I3   its input gradient                   W3   its weight gradient           (B3 = I3 and W3)

    rank 0   F0 F1 F2 B0 F3 B1 B2 B3          a schedule is a table of such rows, one for each rank;
    rank 1   F0 F1 B0 F2 B1 F3 B2 B3          the same table is validated, drawn, simulated and executed
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3

Stages are numbered along the model, and the first one is 0. Where a rank has several stages, the number of
the stage stands before the letter, as in torch.distributed.pipelining: 2F0 is the forward of microbatch 0 in
stage 2. (The zero-bubble paper, Qi et al. 2023, writes B for our I.)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"

# The kinds of lab.trace.gantt and lab.trace.timeline, which choose the colour.
GANTT_KIND = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "backward",
    WEIGHT_GRADIENT: "weight",
}


class Action(NamedTuple):
    """Holds one action: a forward, a backward or half of a backward, of one microbatch in one stage."""

    kind: str
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = list[list[Action]]  # what each rank does, in its order


def row_text(row: Sequence[Action]) -> str:
    """Return a row as people write it: `F0 F1 B0`, or `0F0 2F0` if the row has several stages."""
    if len({action.stage for action in row}) > 1:
        return " ".join(map(str, row))
    return " ".join(f"{action.kind}{action.microbatch}" for action in row)


def table_text(table: Table) -> str:
    """Return the table as text, with one line for each rank."""
    return "\n".join(f"rank {rank}   {row_text(row)}" for rank, row in enumerate(table))


def placement(table: Table) -> dict[int, int]:
    """Return the rank of each stage; the stages are in order."""
    return dict(sorted((action.stage, rank) for rank, row in enumerate(table) for action in row))


def num_microbatches(table: Table) -> int:
    """Return how many microbatches the table is for."""
    return 1 + max((action.microbatch for row in table for action in row), default=-1)


def dependencies(action: Action, last_stage: int) -> Iterable[Action]:
    """Return the actions, of this rank or another, that must end before this action can begin.

    A B counts as an I, because it computes the same input gradient; see `as_dependency`.
    """
    kind, microbatch, stage = action
    if kind == FORWARD:
        return [Action(FORWARD, microbatch, stage - 1)] if stage > 0 else []
    if kind == WEIGHT_GRADIENT:
        return [Action(INPUT_GRADIENT, microbatch, stage)]
    own = [Action(FORWARD, microbatch, stage)]
    return own if stage == last_stage else [*own, Action(INPUT_GRADIENT, microbatch, stage + 1)]


def as_dependency(action: Action) -> Action:
    """Return the name that `dependencies` has for the action: a B is listed as the I that it contains."""
    return action._replace(kind=INPUT_GRADIENT) if action.kind == BACKWARD else action
