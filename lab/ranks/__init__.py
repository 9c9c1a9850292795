"""Run a function on N ranks of this machine, from a script, test or notebook: `run_ranks(fn, world_size=4)`.

Each rank is forked in milliseconds (lab/ranks/forked.py). The parent prints the ranks' lines as they arrive
and collects the results. After an error or a hang it names the rank and the source line, and ends all ranks.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from lab import replace
from lab.launch.devices import refuse_devices
from lab.ranks import stacks
from lab.ranks.child import READY, Job
from lab.ranks.forked import Processes
from lab.ranks.waiting import Wait, drawn
from lab.units import MAX_SECONDS

_GRACE = 0.5  # seconds to wait for an earlier failure that arrives after a later one
_STACKS = 5.0  # seconds that a rank may need to say where it is
_LOOK = 1.0  # the same for one of several looks

# Set it to learn more of each failure: what it returns on the rank that fails is in RankError.described.
describe: Callable[[BaseException], Any] | None = None


class RankError(RuntimeError):
    """Report a rank that failed, died or hung. The text is its traceback, or says how it died or hangs.

    `rank` is the rank that failed first or, after a hang, the lowest rank that is stuck. `described` has what
    `describe` says of each rank's failure. `waits` says after a hang who waits for whom.
    """

    def __init__(
        self,
        rank: int,
        text: str,
        described: dict[int, Any] | None = None,
        waits: dict[int, Wait] | None = None,
    ) -> None:
        super().__init__(text)
        self.rank, self.described, self.waits = rank, described or {}, waits or {}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    device: str = "cpu",
    group_timeout: float | None = None,
    collect_failures: bool = False,
    look_every: float | None = None,
) -> list[Any]:
    """Call `fn(cluster, *args)` in `world_size` processes that form one group; return results in rank order.

    `timeout` limits the call, and `group_timeout` a single communication, in seconds; the second is longer,
    so that the report of a hang comes first. With `look_every` a cycle of ranks that wait for one another
    ends the call earlier: at the second of two looks, so many seconds apart, if no rank has sent anything.
    `backend=None` starts the ranks without a group. `device` is "cpu" or "cuda". With GPUs `backend` may be
    "nccl", which needs a GPU for each rank.

    Raise RankError with the traceback of the rank that failed first, or with the line where each rank is
    stuck. With `collect_failures` a rank that fails in `fn` does not end the others: its place in the result
    holds its RankError. Raise WorkbookError if this machine cannot offer `device` and `backend`.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}.")
    limit = min(2 * timeout, MAX_SECONDS) if group_timeout is None else group_timeout
    refuse_devices(device, backend, world_size)
    work = cloudpickle.dumps((fn, args, replace.active()))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        given = world_size, folder, backend, device, limit, work, list(sys.path), os.getcwd()
        processes = Processes([Job(rank, *given, describe=describe) for rank in range(world_size)])
        try:
            return _Call(processes, folder, timeout, collect_failures, look_every).results()
        finally:
            processes.end()


class _Call:
    """Collect the answers and the failures of one call's ranks."""

    def __init__(
        self,
        processes: Processes,
        folder: str,
        timeout: float,
        collect_failures: bool,
        look_every: float | None,
    ) -> None:
        self.processes, self.folder, self.timeout = processes, folder, timeout
        self.collect_failures, self.look_every = collect_failures, look_every
        self.start = time.monotonic()
        self.ready: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, tuple[float, RankError]] = {}

    def results(self) -> list[Any]:
        num_ranks = len(self.processes.all)
        for rank, message in self._messages():
            self._take(rank, message)
            if self._has_failed() or len(self.answers) + len(self.failures) == num_ranks:
                break
        else:
            raise self._hang()
        self._drain()
        if self._has_failed():
            raise self._first_failure()
        everything = self.answers | {rank: error for rank, (_, error) in self.failures.items()}
        return [everything[rank] for rank in range(num_ranks)]

    def _messages(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield what the ranks send until the time is up, or until two looks find the same deadlock."""
        before = None
        while (left := self.start + self.timeout - time.monotonic()) > 0:
            yield from self.processes.messages(min(left, self.look_every or left))
            found = stacks.deadlock(self._stuck(), self.folder, _LOOK) if self.look_every else None
            if found is not None and found == before:
                return
            before = found

    def _stuck(self) -> dict[int, Any]:
        done = self.answers | self.failures
        return {rank: one for rank, one in enumerate(self.processes.all) if rank not in done}

    def _has_failed(self) -> bool:
        # A group is formed by all ranks or by none, so the others cannot go on without one that is not ready.
        return bool(self.failures if not self.collect_failures else self.failures.keys() - self.ready)

    def _drain(self) -> None:
        for rank, message in self.processes.messages(_GRACE):
            self._take(rank, message)

    def _take(self, rank: int, message: bytes | None) -> None:
        if message == READY:
            self.ready.add(rank)
            return
        if message is None:
            how = self.processes.all[rank].death()
            # A death counts as the first failure, because it causes the errors of its peers.
            self.failures[rank] = (0.0, RankError(rank, f"rank {rank} {how} before it returned."))
            return
        self.processes.forget(rank)
        when, result, trace = cloudpickle.loads(message)
        if trace is None:
            self.answers[rank] = result
        else:
            text = trace if isinstance(trace, str) else "".join(trace.format())
            described = {} if result is None else {rank: result}
            self.failures[rank] = (when, RankError(rank, f"rank {rank} failed:\n\n{text}", described))

    def _first_failure(self) -> RankError:
        rank, (_, error) = min(self.failures.items(), key=lambda item: item[1][0])
        others = [_short(later) for r, (_, later) in sorted(self.failures.items()) if r != rank]
        note = "\nAfterwards also: " + "; ".join(others) if others else ""
        described = {r: text for _, one in self.failures.values() for r, text in one.described.items()}
        return RankError(rank, f"{error}{note}", described)

    def _hang(self) -> RankError:
        ranks = range(len(self.processes.all))
        seconds = min(self.timeout, round(time.monotonic() - self.start, 1))
        stuck = list(asked := self._stuck())
        places, waits = stacks.ask(asked, self.folder, _STACKS)
        self._drain()
        lines = [f"no answer within {seconds:g} s."]
        for rank in ranks:
            if rank in stuck:
                how = "still" if places[rank].startswith(stacks.COMPUTING) else "stuck"
                lines.append(f"rank {rank} is {how} {places[rank]}")
            elif rank in self.answers:
                lines.append(f"rank {rank} has finished")
            else:
                lines.append(_short(self.failures[rank][1]))
        if waits:
            lines.append(drawn(waits))
        return RankError(stuck[0], "\n  ".join(lines), waits=waits)


def _short(error: RankError) -> str:
    """Return the first line of an error, which names the rank, and the last one, which names the error."""
    lines = str(error).strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
