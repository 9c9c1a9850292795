"""Choose the pattern of a collective by measuring: `pattern="auto"` takes the one predicted to be fastest.

      seconds                        . flat: few messages, so it is fast while latencies count
        |                         .
        |                      .           _ - ring: few bytes, so it is fast for large tensors
        |      _ _ _ _ _ _.- -  -   -
        |           .                             measured at the sizes *, and linear between them
        |   . *         *                    *
        +-------------------------------------- bytes

The formulas of cost.py hold for ranks with links of their own. But ranks may also share cores, caches and
memory. So at the first "auto" of an operation in a group, its ranks measure each pattern at a few sizes. From
two neighbouring sizes follow the pattern's own alpha and beta: t = alpha + b beta. That takes less than a
second, and all ranks come to the same numbers. MPI's libraries choose by such tables, too (Pjesivac-Grbovic
et al., "Performance analysis of MPI collective operations", 2007).

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

from comm.transport import slow_link
from comm.transport.choice import chosen_transport
from comm.transport.wire import Group, group_of
from lab import units
from lab.ledger import LEDGER

SIZES = (64, 64 << 10, 1 << 20, 16 << 20)  # bytes of the full tensor
RUNS = (7, 5, 5, 3)
BUDGET_SECONDS = 2.0  # for one size; on a slow link the larger sizes are left out
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
    times = _times(op, patterns, run, group)
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


def _times(op: str, patterns: Sequence[str], run: Run, group: Group) -> Times:
    measured = _measured.setdefault(group_of(group), {})
    key = _circumstances(op, group)
    if key not in measured:
        with LEDGER.paused():
            measured[key] = _measure(op, patterns, run, group)
    return measured[key]


def _circumstances(op: str, group: Group) -> tuple:
    return op, chosen_transport(group), slow_link.current()


def _measure(op: str, patterns: Sequence[str], run: Run, group: Group) -> Times:
    """Return the median seconds of the slowest rank, of each pattern at each size; at least two sizes."""
    times: Times = {pattern: [] for pattern in patterns}
    for size, runs, larger in zip(SIZES, RUNS, (*SIZES[1:], 0), strict=True):
        tensors = _arguments(op, size, group_of(group).size())
        spent = [[_timed(op, run, tensors, group, pattern) for pattern in patterns] for _ in range(1 + runs)]
        slowest = torch.tensor(spent[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks must get the same numbers
        for pattern, of_runs in zip(patterns, slowest.T.tolist(), strict=True):
            times[pattern].append(statistics.median(of_runs))
        total = sum(one[-1] for one in times.values()) * (1 + runs)
        if len(times[patterns[0]]) > 1 and total * larger / size > BUDGET_SECONDS:
            break
    return times


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
