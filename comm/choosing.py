"""Choose the pattern of a collective by measuring: `pattern="auto"` takes the one predicted to be fastest.

      seconds                        . flat: few messages, so it is fast while latencies count
        |                         .
        |                      .           _ - ring: few bytes, so it is fast for large tensors
        |      _ _ _ _ _ _.- -  -   -
        |           .                             measured at the sizes *, and linear between them
        |   . *         *                    *
        +-------------------------------------- bytes

The formulas of cost.py hold for ranks with links of their own. But ranks may also share cores, caches and
memory. So at the first "auto" of an operation in a group, its ranks measure each pattern at a few sizes, up
to that of the tensor. From two neighbouring sizes follow the pattern's own alpha and beta: t = alpha + b
beta. That takes a second or two, and all ranks come to the same numbers. MPI's libraries choose by such
tables, too (Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations", 2007).

Measured times differ from run to run, and so may the pattern, and with it the last bits of a sum. For runs
that must be repeated bit for bit, name a pattern.
"""

import bisect
import statistics
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from comm.transport.choice import chosen_transport
from comm.wire import slow_link
from comm.wire.wire import Group, group_of
from lab import units
from lab.trace.ledger import LEDGER

SIZES = (64, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of the full tensor
RUNS = (21, 21, 11, 7, 5)
BUDGET_SECONDS = 2.0  # for one size; on a slow link the larger sizes are left out
HOPELESS = 2.0  # patterns that are predicted to be so many times slower are not measured at a size
Run = Callable[..., object]  # runs a function of comm.collectives, by its name
Times = dict[str, list[float]]  # by pattern, the seconds at the first sizes of SIZES

_choices: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, str]]" = weakref.WeakKeyDictionary()
_measured: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Times]]" = weakref.WeakKeyDictionary()


def fastest(
    op: str,
    num_bytes: int | None,
    patterns: Sequence[str],
    run: Run,
    group: Group = None,
) -> str:
    """Return the pattern that is predicted to be fastest for a full tensor of `num_bytes`.

    None means any size: the pattern is the one that is fastest for all sizes together. `run` calls a function
    of comm.collectives. All ranks of the group call this at the same point of their program, and get the same
    answer.
    """
    if len(patterns) == 1:
        return patterns[0]
    choices = _choices.setdefault(group_of(group), {})
    key = (*_circumstances(op, group), num_bytes)
    if key not in choices:
        choices[key] = _choose(op, num_bytes, patterns, run, group)
    return choices[key]


def _choose(
    op: str,
    num_bytes: int | None,
    patterns: Sequence[str],
    run: Run,
    group: Group,
) -> str:
    if group_of(group).size() == 1:
        return patterns[0]
    times = _times(op, num_bytes or SIZES[-2], patterns, run, group)
    if num_bytes is None:
        return min(patterns, key=lambda pattern: sum(times[pattern]))
    return min(patterns, key=lambda pattern: seconds(times[pattern], num_bytes))


def reason(op: str, num_bytes: int, group: Group = None) -> str:
    """Return why "auto" takes its pattern: the predicted seconds of all patterns of `op`, fastest first.

    It is empty if this group has not measured the operation.
    """
    times = _measured.get(group_of(group), {}).get(_circumstances(op, group), {})
    predicted = sorted((seconds(one, num_bytes), pattern) for pattern, one in times.items())
    return ", ".join(f"{pattern} {units.show_seconds(took)}" for took, pattern in predicted)


def seconds(times: Sequence[float], num_bytes: int) -> float:
    """Return the seconds predicted for a tensor, from the seconds measured at the first sizes of SIZES.

    The time between two sizes is linear, and so is the time beyond the last.
    """
    at = min(max(1, bisect.bisect_left(SIZES, num_bytes)), len(times) - 1)
    below, above = SIZES[at - 1], SIZES[at]
    beta = (times[at] - times[at - 1]) / (above - below)
    return times[at - 1] + max(0, num_bytes - below) * max(0.0, beta)


def _times(op: str, num_bytes: int, patterns: Sequence[str], run: Run, group: Group) -> Times:
    """Return what is measured up to a size that is not smaller than `num_bytes`. Measure what is missing."""
    measured = _measured.setdefault(group_of(group), {})
    times = measured.setdefault(_circumstances(op, group), {pattern: [] for pattern in patterns})
    with LEDGER.paused():
        while hopeful := _to_measure(times, num_bytes):
            _measure(op, times, hopeful, run, group)
    return times


def _circumstances(op: str, group: Group) -> tuple:
    return op, chosen_transport(group), slow_link.current()


def _to_measure(times: Times, num_bytes: int) -> list[str]:
    """Return the patterns to be measured at the next size, or none if that size is not needed."""
    have = len(next(iter(times.values())))
    if have < 2:
        return list(times)
    if have == len(SIZES) or SIZES[have - 1] >= num_bytes:
        return []
    predicted = {pattern: seconds(one, SIZES[have]) for pattern, one in times.items()}
    limit = HOPELESS * min(predicted.values())
    hopeful = [pattern for pattern, took in predicted.items() if took <= limit]
    total = sum(predicted[pattern] for pattern in hopeful) * (1 + RUNS[have])
    return hopeful if total <= BUDGET_SECONDS else []


def _measure(op: str, times: Times, hopeful: list[str], run: Run, group: Group) -> None:
    """Add the median seconds of the slowest rank at the next size. The other patterns get a prediction.

    A pattern that is slower than predicted gives others hope, which are then measured, too. A link may let a
    first burst through at once, so that all predictions from small sizes are wrong.
    """
    have = len(times[hopeful[0]])
    tensors = _arguments(op, SIZES[have], group_of(group).size())
    medians: dict[str, float] = {}
    while hopeful:
        spent = [[_timed(op, run, tensors, group, one) for one in hopeful] for _ in range(1 + RUNS[have])]
        slowest = torch.tensor(spent[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks must get the same numbers
        medians |= {pattern: statistics.median(slowest[:, i].tolist()) for i, pattern in enumerate(hopeful)}
        limit, rest = HOPELESS * min(medians.values()), [one for one in times if one not in medians]
        hopeful = [pattern for pattern in rest if seconds(times[pattern], SIZES[have]) <= limit]
    for pattern, one in times.items():
        one.append(medians[pattern] if pattern in medians else seconds(one, SIZES[have]))


def _arguments(op: str, num_bytes: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """Return tensors for the operation; the full one has about `num_bytes`."""
    shard = torch.zeros(-(-num_bytes // 4 // ranks))
    full = torch.zeros(len(shard) * ranks)
    match op:
        case "all_gather":
            return full, shard
        case "scatter" | "gather" | "reduce_scatter":
            return shard, full
        case "all_to_all":
            return torch.zeros_like(full), full
    return (full,)


def _timed(op: str, run: Run, tensors: Sequence, group: Group, pattern: str) -> float:
    run("barrier", group=group)  # or a rank would also wait for the end of the pattern before
    start = time.perf_counter()
    run(op, *tensors, group=group, pattern=pattern)
    return time.perf_counter() - start
