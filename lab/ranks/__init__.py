"""Run a function on N ranks of this machine, from a script, test or notebook: `run_ranks(fn, world_size=4)`.

Each rank is forked in milliseconds (lab/ranks/forked.py). The parent prints the ranks' lines as they arrive
and collects the results. After an error or a hang it names the rank and the source line, and ends all ranks.
"""

import os
import selectors
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from lab import replace
from lab.launch.devices import refuse_devices
from lab.ranks import forked, stacks
from lab.ranks.child import Job
from lab.ranks.compared import Compared
from lab.ranks.output import print_tagged, read_lines
from lab.ranks.waiting import Wait, drawn
from lab.units import MAX_SECONDS

_GRACE = 0.5  # seconds to wait for an earlier failure that arrives after a later one
_STACKS = 5.0  # seconds that a rank may need to say where it is


class RankError(RuntimeError):
    """Report a rank that failed, died or hung. The text is its traceback, or says how it died or hangs.

    `rank` is the rank that failed first or, after a hang, the lowest rank that is stuck. `compared` has, for
    each rank that failed with an assertion, what that compared. `waits` says after a hang who waits for whom.
    """

    def __init__(
        self,
        rank: int,
        text: str,
        compared: dict[int, Compared] | None = None,
        waits: dict[int, Wait] | None = None,
    ) -> None:
        super().__init__(text)
        self.rank, self.compared, self.waits = rank, compared or {}, waits or {}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    device: str = "cpu",
    group_timeout: float | None = None,
    collect_failures: bool = False,
) -> list[Any]:
    """Call `fn(cluster, *args)` in `world_size` processes that form one group; return results in rank order.

    `timeout` limits the call, and `group_timeout` a single communication, in seconds; the second is longer,
    so that the report of a hang comes first. `backend=None` starts the ranks without a group. `device` is
    "cpu" or "cuda". With GPUs `backend` may be "nccl", which needs a GPU for each rank.

    Raise RankError with the traceback of the rank that failed first, or with the line where each rank is
    stuck. With `collect_failures` a failing rank does not end the others: its place in the result holds its
    RankError. Raise WorkbookError if this machine cannot offer `device` and `backend`.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}.")
    limit = min(2 * timeout, MAX_SECONDS) if group_timeout is None else group_timeout
    for name, seconds in (("timeout", timeout), ("group_timeout", limit)):
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(
                f"{name} must be a number of seconds above 0 and at most {MAX_SECONDS}, not {seconds:g}."
            )
    refuse_devices(device, backend, world_size)
    work = cloudpickle.dumps((fn, args, replace.active()))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = (list(sys.path), os.getcwd())
        jobs = [Job(r, world_size, folder, backend, device, limit, work, *place) for r in range(world_size)]
        supervisor = _Supervisor(jobs, timeout, collect_failures)
        try:
            return supervisor.results()
        finally:
            supervisor.end()


class _Supervisor:
    """Run the parent's side of one call, with the processes, their pipes, and the answers from them."""

    def __init__(self, jobs: list[Job], timeout: float, collect_failures: bool) -> None:
        self.jobs, self.timeout, self.collect_failures = jobs, timeout, collect_failures
        self.started: list[forked.ForkedProcess] = []
        self.selector = selectors.DefaultSelector()
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, tuple[float, RankError]] = {}

    def results(self) -> list[Any]:
        self.started = forked.start(self.jobs)
        for job, rank in zip(self.jobs, self.started, strict=True):
            for pipe, what in ((rank.pipe, "answer"), (rank.out, sys.stdout), (rank.err, sys.stderr)):
                self.selector.register(pipe, selectors.EVENT_READ, (job.rank, what, bytearray()))
        deadline = time.monotonic() + self.timeout
        while len(self.answers) + len(self.failures) < len(self.jobs):
            if self.failures and not self.collect_failures:
                break
            if not self._turn(deadline):
                raise self._hang()
        self._drain(time.monotonic() + _GRACE)
        if self.failures and not self.collect_failures:
            raise self._first_failure()
        everything = self.answers | {rank: error for rank, (_, error) in self.failures.items()}
        return [everything[job.rank] for job in self.jobs]

    def end(self) -> None:
        forked.end(self.started)
        self.selector.close()

    def _turn(self, deadline: float) -> bool:
        """Wait for output or answers, and handle them. Return False if the deadline has passed."""
        ready = self.selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            rank, what, buffer = key.data
            if what == "answer":
                self.selector.unregister(key.fileobj)
                self._take_answer(rank, key.fileobj)
                continue
            lines, is_open = read_lines(key.fileobj, buffer)  # type: ignore[arg-type]
            if not is_open:
                self.selector.unregister(key.fileobj)
            for line in lines:
                print_tagged(rank, line, what)
            what.flush()
        # Check the time even if there is output: a rank may print without end.
        return bool(ready) and time.monotonic() < deadline

    def _drain(self, deadline: float) -> None:
        while self.selector.get_map() and self._turn(deadline):
            pass

    def _take_answer(self, rank: int, pipe: Any) -> None:
        try:
            answer = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            how = self.started[rank].death()
            # A death counts as the first failure, because it causes the errors of its peers.
            self.failures[rank] = (0.0, RankError(rank, f"rank {rank} {how} before it returned."))
            return
        try:
            when, result, trace = cloudpickle.loads(answer)
        except Exception as error:
            when, result, trace = time.monotonic(), None, f"its result cannot be unpickled: {error!r}"
        if trace is None:
            self.answers[rank] = result
        else:
            text = trace if isinstance(trace, str) else "".join(trace.format())
            compared = {rank: result} if isinstance(result, Compared) else {}
            self.failures[rank] = (when, RankError(rank, f"rank {rank} failed:\n\n{text}", compared))

    def _first_failure(self) -> RankError:
        rank, (_, error) = min(self.failures.items(), key=lambda item: item[1][0])
        others = [_short(later) for r, (_, later) in sorted(self.failures.items()) if r != rank]
        note = "\nAfterwards also: " + "; ".join(others) if others else ""
        compared = {r: c for _, one in self.failures.values() for r, c in one.compared.items()}
        return RankError(rank, f"{error}{note}", compared)

    def _hang(self) -> RankError:
        stuck = [job.rank for job in self.jobs if job.rank not in self.answers | self.failures]
        asked = {rank: self.started[rank] for rank in stuck}
        places, waits = stacks.ask(asked, self.jobs[0].folder, _STACKS)
        self._drain(time.monotonic() + _GRACE)
        lines = [f"no answer within {self.timeout:g} s."]
        for job in self.jobs:
            if job.rank in stuck:
                how = "still" if places[job.rank].startswith(stacks.COMPUTING) else "stuck"
                lines.append(f"rank {job.rank} is {how} {places[job.rank]}")
            elif job.rank in self.answers:
                lines.append(f"rank {job.rank} has finished")
            else:
                lines.append(_short(self.failures[job.rank][1]))
        if waits:
            lines.append(drawn(waits))
        return RankError(stuck[0], "\n  ".join(lines), waits=waits)


def _short(error: RankError) -> str:
    """Return the first line of an error, which names the rank, and the last one, which names the error."""
    lines = str(error).strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
