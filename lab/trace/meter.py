"""Measure the speed, memory and traffic of a training run, and print progress lines.

    meter = Meter(cluster, "data_parallel_naive", steps=50, tokens_per_step=global_tokens, as_json=args.json)
    for step in range(50):
        with meter.step() as record:
            record.loss = forward_backward_and_update(step)
    summary = meter.finish(replicas_equal=True)      # training/report.py prints it

All ranks measure, and rank 0 prints. Only what happens inside `with meter.step()` belongs to a step.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from lab.cluster import Cluster
from lab.trace.ledger import BACKGROUND, LEDGER, Entry, Traffic
from lab.trace.stream_clock import time_when_done

PROGRESS_SECONDS = 2.0  # between two progress lines


@dataclass
class StepRecord:
    """Holds the loss of a step. A tensor is read late, because that makes the host wait for the GPU."""

    loss: Tensor | float | None = None


class Meter:
    """Times the steps of one rank, without the first `warmup` steps, but at most half of all.

    `round_steps` is the number of steps after which the training repeats itself: 1, unless it communicates in
    some steps only. The time of a step is then the mean over a round.
    `tokens_per_step` is that of the global batch, over all ranks, and `unit` names what they are. `steps` is
    the number of the last step; a run that continues from a checkpoint begins after `first_step`.
    """

    def __init__(
        self,
        cluster: Cluster,
        run_mode: str,
        steps: int,
        tokens_per_step: int,
        as_json: bool = False,
        warmup: int = 2,
        first_step: int = 0,
        unit: str = "tokens",
        round_steps: int = 1,
    ) -> None:
        self._cluster, self._run_mode, self._as_json = cluster, run_mode, as_json
        self._steps, self._first_step, self._warmup = steps, first_step, warmup
        self._tokens_per_step, self._unit, self._round_steps = tokens_per_step, unit, round_steps
        self.windows: list[tuple[int, int]] = []  # start and end of each step, nanoseconds of perf_counter_ns
        self._console = Console(stderr=as_json)
        self._printed_at = -math.inf
        self._first_loss: float | None = None
        self._last_loss: Tensor | float | None = None
        self.traffic: dict[Entry, Traffic] = {}  # sent inside the steps, without headers
        self._at_end = LEDGER.rows()  # of the last step
        self._peak: int | None = None
        reset_peak_memory(cluster.device)

    @contextmanager
    def step(self, mean_loss: Callable[[Any], Any] = lambda loss: loss) -> Iterator[StepRecord]:
        """Time one step, unless it raises, and show progress.

        `mean_loss` makes the loss to show from this rank's; what it does and sends belongs to no step.
        """
        before = {entry: sent for entry, sent in LEDGER.rows().items() if entry.axis != BACKGROUND}
        before |= {entry: sent for entry, sent in self._at_end.items() if entry.axis == BACKGROUND}
        # Kernels still queued belong to the step that launched them.
        record, start_ns = StepRecord(), time_when_done(self._cluster.device)
        yield record
        self.windows.append((start_ns, time_when_done(self._cluster.device)))
        self._at_end = LEDGER.rows()
        for entry, traffic in self._at_end.items():
            new = traffic - before.get(entry, Traffic())
            if new != Traffic() and not entry.is_header:
                self.traffic[entry] = self.traffic.get(entry, Traffic()) + new
        if self._first_step + len(self.windows) == self._steps:
            self._peak = peak_memory(self._cluster.device)  # what follows, such as a report, is no training
        # Detached, or the loss would keep the step's graph alive through the next one.
        self._last_loss = mean_loss(record.loss.detach() if isinstance(record.loss, Tensor) else record.loss)
        if len(self.windows) == 1:
            self._first_loss = self._loss()
        if self._cluster.is_main:  # reading the loss makes the host wait for a GPU
            self._show_progress()

    def note(self, text: str) -> None:
        if self._cluster.is_main:
            self._console.print(Text(f"{self._run_mode}  {text}", style="cyan"), soft_wrap=True)

    def finish(self, **extras: Any) -> dict[str, Any]:
        """Return this rank's summary; NaN and infinity become None.

        Traffic between steps is left out. `peak_memory_bytes` is the peak between the meter's creation and
        the end of the last step: of the process's memory on the CPU, of its tensors on a GPU.
        """
        sent = sum(self.traffic.values(), Traffic())
        summary = {
            "run_mode": self._run_mode,
            "world_size": self._cluster.world_size,
            "steps": len(self.windows),
            "first_loss": self._first_loss,
            "last_loss": self._loss(),
            "step_seconds": self._step_seconds(),
            "tokens_per_second": self._tokens_per_second(),
            "peak_memory_bytes": peak_memory(self._cluster.device) if self._peak is None else self._peak,
            "bytes_sent": sent.bytes_sent,
            "messages_sent": sent.messages_sent,
        }
        return {key: _plain(value) for key, value in (summary | extras).items()}

    def _step_seconds(self) -> float | None:
        """Return the median over rounds; a mean would also have those in which the machine was busy."""
        seconds = [(end_ns - start_ns) / 1e9 for start_ns, end_ns in self.windows]
        timed = seconds[min(self._warmup, len(seconds) // 2) :]
        size = min(self._round_steps, len(timed))
        rounds = [timed[end - size : end] for end in range(size, len(timed) + 1, size)] if timed else []
        return statistics.median(map(statistics.fmean, rounds)) if rounds else None

    def _tokens_per_second(self) -> float | None:
        seconds = self._step_seconds()
        return None if seconds is None else self._tokens_per_step / seconds

    def _loss(self) -> float | None:
        return None if self._last_loss is None else float(self._last_loss)

    def _show_progress(self) -> None:
        done = self._first_step + len(self.windows)
        waited = time.perf_counter() - self._printed_at
        if len(self.windows) > 1 and done < self._steps and waited < PROGRESS_SECONDS:
            return
        loss, rate = self._loss(), self._tokens_per_second()
        words = f"loss {'-' if loss is None else format(loss, '.4f')}  {rate:,.0f} {self._unit}/s"
        self.note(f"step {done}/{self._steps}  {words}")
        self._printed_at = time.perf_counter()


def _plain(value: Any) -> Any:
    """Return the value as strict JSON takes it: NaN and infinity, also in a list, as None."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not Linux, or not allowed: the peak will be that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets VmHWM to the current resident size


def peak_memory(device: torch.device) -> int | None:
    """Return the peak in bytes since the last reset: of the process, or on a GPU of its tensors; or None."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        if sys.platform == "win32":
            return None
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
