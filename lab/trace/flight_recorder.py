"""Say from the dumps of PyTorch's flight recorder why ranks hang: which rank, which operation, which line.

    python -m lab.trace.flight_recorder dumps

    Group 0 (ranks 0, 1 and 2), collective 3: ranks 0 and 2 wait in all_reduce, at train.py:14 in step: ...
      Rank 1 has not called it: it was at train.py:12 in step: time.sleep(60)

Ranks of a group must call the same collectives in the same order, with tensors of the same shape and dtype.
So the k-th collectives of all ranks are compared, and the first k at which they differ is the cause.
PyTorch's own torchfrtrace does so for nccl. In version 2.13 it cannot read the dumps of gloo.
"""

import json
import linecache
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from lab.launch.errors import WorkbookError
from lab.trace.black_box import ENDED, FAILED

# The inputs of these have the same shape on all ranks. Those of a scatter or an all-to-all may differ.
EQUAL_INPUTS = ("all_reduce", "all_gather", "broadcast", "gather", "reduce", "reduce_scatter")
LATE = 0.01  # seconds; a rank that arrives later than the first one, by that much and mostly, is a straggler
MIN_CALLS = 5  # fewer calls show no habit


@dataclass(frozen=True)
class Call:
    """Holds one collective as one rank has called it. `number` counts the collectives of its group from 1."""

    group: str
    number: int
    op: str
    tensors: str  # shapes and dtypes of the input, such as "(4) Float"
    has_ended: bool
    place: str
    called_ns: int


@dataclass(frozen=True)
class Recording:
    """Holds what one rank has recorded: its calls, its state at that time, and where it was."""

    rank: int
    calls: list[Call]
    state: str
    error: str
    place: str
    groups: dict[str, list[int]]

    def calls_of(self, group: str) -> dict[int, Call]:
        return {call.number: call for call in self.calls if call.group == group}

    def whereabouts(self) -> str:
        """Return what is known about a rank that has not arrived."""
        if self.state == ENDED:
            return "it has ended"
        return f"it {f'has failed with {self.error}, at' if self.state == FAILED else 'was at'} {self.place}"


def load(folder: str | Path) -> dict[int, Recording]:
    """Return the recordings in a folder by rank. WorkbookError if there is none, or a file is no dump."""
    recordings = [_recording(path) for path in Path(folder).glob("rank_*[0-9]")]
    if not recordings:
        raise WorkbookError(f"{folder} has no dump: a dump's name ends with its rank, as rank_0 does.")
    return {one.rank: one for one in sorted(recordings, key=lambda one: one.rank)}


def analyse(recordings: Mapping[int, Recording]) -> list[str]:
    """Return sentences that name, for each group, the first collective in which its ranks do not agree."""
    members: dict[str, set[int]] = {}
    for rank, one in recordings.items():
        for group in {call.group for call in one.calls}:
            members.setdefault(group, set()).update(one.groups.get(group, [rank]))
    lost = sorted(set().union(*members.values()) - set(recordings))
    sentences = [f"There is no dump of {_ranks(lost)}, which died early or wrote elsewhere."] if lost else []
    for group, ranks in sorted(members.items()):
        present = {rank: recordings[rank] for rank in sorted(ranks & set(recordings))}
        sentences += _first_difference(group, present) or _straggler(group, present)
    agreed = "The ranks have called the same collectives, and all of them have ended."
    failed = [f"Rank {r} failed: {o.error}, at {o.place}" for r, o in recordings.items() if o.state == FAILED]
    return sentences or failed or [agreed]


def _first_difference(group: str, recordings: Mapping[int, Recording]) -> list[str]:
    calls = {rank: one.calls_of(group) for rank, one in recordings.items()}
    # A recorder keeps only the last calls. Numbers before the first one that all have kept are not compared.
    first = max((min(numbers) for numbers in calls.values() if numbers), default=1)
    last = max((max(numbers) for numbers in calls.values() if numbers), default=0)
    for number in range(first, last + 1):
        made = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers}
        absent = [one for rank, one in recordings.items() if rank not in made]
        running = {rank: call for rank, call in made.items() if recordings[rank].state != ENDED}
        lines = _operations(made) or _tensors(made) or _absence(made, absent) or _unfinished(running)
        if lines:
            head = f"Group {group} ({_ranks(calls)}), collective {number}: {lines[0]}"
            return [head, *(f"  {line}" for line in lines[1:])]
    return []


def _operations(made: Mapping[int, Call]) -> list[str]:
    if len({call.op for call in made.values()}) == 1:
        return []
    kinds = _by(made, lambda call: f"{call.op}, at {call.place}")
    return [
        "the ranks have called different operations.",
        *(f"{_ranks(ranks)} called {kind}" for kind, ranks in kinds.items()),
        "Ranks call collectives in different orders, or one rank makes a call that others do not make.",
    ]


def _tensors(made: Mapping[int, Call]) -> list[str]:
    op, kinds = next(iter(made.values())).op, _by(made, lambda call: call.tensors)
    if op not in EQUAL_INPUTS or len(kinds) == 1:
        return []
    brought = (f"{_ranks(r)}: {tensors}, at {made[r[0]].place}" for tensors, r in kinds.items())
    return [f"the tensors of {op} differ.", *brought]


def _absence(made: Mapping[int, Call], absent: Iterable[Recording]) -> list[str]:
    missing = [f"Rank {one.rank} has not called it: {one.whereabouts()}" for one in absent]
    kinds = _by(made, lambda call: f"in {call.op}, at {call.place}")
    waiting = [f"{_ranks(r)} {'waits' if len(r) == 1 else 'wait'} {where}" for where, r in kinds.items()]
    return ["; ".join(waiting), *missing] if missing else []


def _unfinished(made: Mapping[int, Call]) -> list[str]:
    pending = [rank for rank, call in made.items() if not call.has_ended]
    if not pending:
        return []
    call = made[pending[0]]
    return [f"all ranks have called {call.op}, it has not ended on {_ranks(pending)}, at {call.place}"]


def _straggler(group: str, recordings: Mapping[int, Recording]) -> list[str]:
    """Name a rank that is the last to arrive in most collectives, if it is late by more than LATE."""
    calls = [one.calls_of(group) for one in recordings.values()]
    common = set.intersection(*map(set, calls)) if calls else set()
    late: dict[int, list[float]] = {}
    for number in common:
        arrived = {rank: one.calls_of(group)[number].called_ns for rank, one in recordings.items()}
        last = max(arrived, key=arrived.__getitem__)
        late.setdefault(last, []).append((arrived[last] - min(arrived.values())) / 1e9)
    rank = max(late, key=lambda rank: len(late[rank]), default=0)
    if len(common) < MIN_CALLS or len(late[rank]) * 2 < len(common):
        return []
    seconds = statistics.median(late[rank])
    if seconds < LATE:
        return []
    return [
        f"Group {group}: rank {rank} is a straggler. It was the last to arrive in {len(late[rank])} of "
        f"{len(common)} collectives, by a median of {seconds * 1e3:.0f} ms after the first rank."
    ]


def _recording(path: Path) -> Recording:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        calls = [Call(**row | {"place": _place(row["place"])}) for row in content["calls"]]
        recording = Recording(**content | {"calls": calls, "place": _place(content["place"])})
    except (ValueError, KeyError, TypeError) as error:
        raise WorkbookError(f"{path} is no dump of lab/trace/black_box.py: {error!r}.") from error
    if recording.state == FAILED and calls and calls[-1].place == recording.place:
        # PyTorch counts a collective that has failed as ended.
        calls[-1] = replace(calls[-1], has_ended=False)
    return recording


def _place(place: tuple[str, int, str] | None) -> str:
    """Return a place as "train.py:14 in step: dist.all_reduce(x)"."""
    if place is None:
        return "a line that was not recorded"
    file, line, function = place
    code = linecache.getline(file, line).strip()
    return f"{file}:{line} in {function}" + (f": {code}" if code else "")


def _by(made: Mapping[int, Call], key: Any) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, call in made.items():
        kinds.setdefault(key(call), []).append(rank)
    return kinds


def _ranks(ranks: Iterable[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def main(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print which rank, which operation and which line the dumps in a folder point at."""
    try:
        print("\n".join(analyse(load(folder))))
    except WorkbookError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    tyro.cli(main)
