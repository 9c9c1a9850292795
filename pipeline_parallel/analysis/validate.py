"""Prove that a schedule is right, from the table alone, before a process starts or a tensor is sent.

    rank 0   0F0 [0B0] 0F1  0B1   waits for 1B0 of rank 1
    rank 1   1F0 [1F1] 1B0  1B1   waits for 0F1 of rank 0

A table can have every action, in a good order on each rank, and still deadlock, as this one does: the two
ranks wait for each other. So the rows are run with messages, each rank as far as it can. When all ranks stop,
either all are at the end of their rows, or some wait for each other in a cycle that no order of running
could avoid (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978). A rank is
looked at again only when what it waits for is done, so a large table takes seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from lab.launch.errors import WorkbookError
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Table,
    as_dependency,
    dependencies,
    num_microbatches,
)

_WHOLE = {FORWARD, BACKWARD}
_HALVES = {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}

_Place = tuple[int, int]  # rank, index in its row


class ScheduleError(WorkbookError):
    """Says in a sentence what is wrong with a table, and shows the table with the wrong cells in brackets."""


def validate(table: Table) -> None:
    """Raise ScheduleError unless the table trains every stage on every microbatch, and comes to its end.

    Every stage is on one rank, and none is left out; it does F, and either B or both I and W, once for each
    microbatch; nothing comes before what it needs, and no ranks wait for each other.
    """
    places = _places(table)
    _check_stages(table)
    _check_complete(table, places)
    _check_progress(table, places)


def held(row: Sequence[Action]) -> Iterator[int]:
    """Yield, for each action of the row, how many microbatches the rank holds, counted in each of its stages.

    A stage holds a microbatch from its F to the end of its B or W.
    """
    now = 0
    for action in row:
        now += action.kind == FORWARD
        yield now
        now -= action.kind in (BACKWARD, WEIGHT_GRADIENT)


def grid(table: Table, marked: Iterable[_Place] = (), notes: Mapping[int, str] | None = None) -> str:
    """Return the table in columns: a line for each rank, `marked` cells in brackets, notes at the ends."""
    marked = set(marked)
    lines = [
        [f"[{action}]" if (rank, i) in marked else f" {action} " for i, action in enumerate(row)]
        for rank, row in enumerate(table)
    ]
    wide = max((len(cell) for line in lines for cell in line), default=0)
    texts = ["".join(cell.ljust(wide) for cell in line) for line in lines]
    longest, digits = max(map(len, texts), default=0), len(str(len(table) - 1))
    return "\n".join(
        f"rank {rank:<{digits}}  {text.ljust(longest)}  {(notes or {}).get(rank, '')}".rstrip()
        for rank, text in enumerate(texts)
    )


def _places(table: Table) -> dict[Action, _Place]:
    """Return the place of each action, by its name as a dependency. No action may be there twice."""
    places: dict[Action, _Place] = {}
    for rank, row in enumerate(table):
        for i, action in enumerate(row):
            kind, microbatch, stage = action
            if kind not in _WHOLE | _HALVES or microbatch < 0 or stage < 0:
                raise _error(f"{action} of rank {rank} is no action.", table, [(rank, i)])
            first = places.setdefault(as_dependency(action), (rank, i))
            if first != (rank, i):
                before = table[first[0]][first[1]]
                raise _error(
                    f"{action} of rank {rank} repeats {before} of rank {first[0]}.",
                    table,
                    [first, (rank, i)],
                )
    return places


def _check_stages(table: Table) -> None:
    homes: dict[int, int] = {}  # the rank of each stage
    for rank, row in enumerate(table):
        for i, (_, _, stage) in enumerate(row):
            if homes.setdefault(stage, rank) != rank:
                both = f"rank {homes[stage]} and on rank {rank}"
                raise _error(f"Stage {stage} is on {both}, and has weights on one.", table, [(rank, i)])
    for stage in range(max(homes, default=0) + 1):
        if stage not in homes:
            raise _error(f"No rank has stage {stage}.", table)


def _check_complete(table: Table, places: dict[Action, _Place]) -> None:
    there: defaultdict[tuple[int, int], dict[str, _Place]] = defaultdict(dict)
    for rank, i in places.values():
        kind, microbatch, stage = table[rank][i]
        there[stage, microbatch][kind] = (rank, i)
    microbatches = range(num_microbatches(table))
    for stage in range(_last_stage(table) + 1):
        for microbatch in microbatches:
            cells = there[stage, microbatch]
            kinds = set(cells)
            if kinds in (_WHOLE, _HALVES):
                continue
            if BACKWARD in kinds and WEIGHT_GRADIENT in kinds:
                wrong = f"does W{microbatch} as well as B{microbatch}, which contains it"
            else:
                missing = (_HALVES if kinds - _WHOLE else _WHOLE) - kinds
                names = [f"{kind}{microbatch}" for kind in "FBIW" if kind in missing]
                wrong = f"never does {' and '.join(names)}"
            raise _error(f"Stage {stage} {wrong}.", table, cells.values())


def in_order(table: Table) -> Iterator[tuple[int, Action]]:
    """Yield each rank's actions in its order, and each after all that it needs; end where all ranks wait."""
    last_stage = _last_stage(table)
    done: set[Action] = set()
    waiting: defaultdict[Action, list[int]] = defaultdict(list)  # by action, the ranks that wait
    at = [0] * len(table)
    can_go_on = list(range(len(table)))
    while can_go_on:
        rank = can_go_on.pop()
        for action in islice(table[rank], at[rank], None):
            missing = next((need for need in dependencies(action, last_stage) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            at[rank] += 1
            done.add(as_dependency(action))
            yield rank, action
            can_go_on += waiting.pop(as_dependency(action), [])


def _check_progress(table: Table, places: dict[Action, _Place]) -> None:
    order, last_stage = list(in_order(table)), _last_stage(table)
    at, done = Counter(rank for rank, _ in order), {as_dependency(action) for _, action in order}
    waits_for = {
        rank: places[next(need for need in dependencies(row[at[rank]], last_stage) if need not in done)]
        for rank, row in enumerate(table)
        if at[rank] < len(row)
    }
    for rank, (on, needed) in waits_for.items():
        if on == rank:
            action, marked = table[rank][at[rank]], [(rank, at[rank]), (on, needed)]
            sentence = f"Rank {rank} does {action} before {table[on][needed]}, which it needs."
            raise _error(sentence, table, marked)
    if waits_for:
        raise _deadlock(table, at, waits_for)


def _deadlock(table: Table, at: Mapping[int, int], waits_for: dict[int, _Place]) -> ScheduleError:
    """Return the error: each rank of `waits_for` is at its cell `at`, and waits for a cell of another."""
    path = [min(waits_for)]
    while waits_for[path[-1]][0] not in path:
        path.append(waits_for[path[-1]][0])
    circle = path[path.index(waits_for[path[-1]][0]) :]

    def target(rank: int) -> str:
        on, i = waits_for[rank]
        return f"{table[on][i]} of rank {on}"

    waits = [f"{table[rank][at[rank]]} of rank {rank} for {target(rank)}" for rank in circle]
    return _error(
        f"The ranks wait for each other: {', '.join(waits)}.",
        table,
        [(rank, at[rank]) for rank in waits_for],
        {rank: f"waits for {target(rank)}" for rank in waits_for},
    )


def _error(
    sentence: str, table: Table, marked: Iterable[_Place] = (), notes: Mapping[int, str] | None = None
) -> ScheduleError:
    return ScheduleError(f"{sentence}\n\n{grid(table, marked, notes)}")


def _last_stage(table: Table) -> int:
    return max((action.stage for row in table for action in row), default=-1)
