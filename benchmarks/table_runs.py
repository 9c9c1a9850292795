"""Run the techniques of benchmarks/table.py: each by its own train script, whose report is caught.

Every run is a job of new processes, so no run finds memory or caches that another one has left. All jobs take
turns, so other load on the machine slows all of them:

      round 1   naive 2 loopback | naive 2 1gbit | naive 4 loopback | ... | 1F1B 2 loopback | ...
      round 2   naive 2 1gbit | naive 4 loopback | ...                             and so on, one further

The tokens per second of a run are those of the global batch, from the moment when the first rank began its
first timed step to the moment when the last rank ended its last one, on the clock that they share.
"""

import ctypes
import importlib
import io
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
import tyro
from rich.console import Console
from rich.progress import track

from hybrid_parallel.planner.auto import read_arguments
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import RankError, run_ranks
from lab.ranks.forked import preload
from lab.replace import replaced
from lab.trace.memory import resident_bytes
from lab.trace.meter import Meter
from training.report import WARMUP_STEPS

ROOT = Path(__file__).resolve().parent.parent
SIZE, BATCH_SIZE, STEPS, RUNS = "8layers", 16, 4, 5
LINKS = ("loopback", "1gbit")
WORKERS = (1, 2, 4)
SCRIPTS = dict(re.findall(r"^(\w+) +(\S+\.py) ", (ROOT / "entrypoint.sh").read_text(), re.MULTILINE))
SCRIPTS["vanilla"] = "benchmarks/vanilla.py"
_STAGES = "--layers 8 --microbatches 8"


class Technique(NamedTuple):
    """Holds a row of the table: the run mode of a script, its options, and the least number of workers."""

    name: str
    run_mode: str
    options: str = ""
    least: int = 1

    @property
    def module(self) -> str:
        return SCRIPTS[self.run_mode].removesuffix(".py").replace("/", ".")


VANILLA = Technique("vanilla", "vanilla")
EXPERTS = Technique("experts", "expert_parallel", "--experts 8 --top-k 2")  # it trains another model
TECHNIQUES = (
    VANILLA,
    Technique("naive", "data_parallel_naive"),
    Technique("naive ring", "data_parallel_naive", "--pattern ring", least=2),
    Technique("naive tree", "data_parallel_naive", "--pattern tree", least=2),
    Technique("overlap", "data_parallel_overlap"),
    Technique("buckets", "data_parallel_bucket_overlap"),
    Technique("DDP", "data_parallel_ddp"),
    Technique("int8", "data_parallel_compressed", least=2),
    Technique("PowerSGD", "data_parallel_compressed", "--compress powersgd", least=2),
    Technique("ZeRO 1", "zero1"),
    Technique("ZeRO 2", "zero2"),
    Technique("ZeRO 3", "zero3"),
    Technique("FSDP", "fsdp"),
    Technique("HSDP", "hsdp", least=4),  # two machines of at least two ranks
    Technique("tensor", "tensor_parallel"),
    Technique("sequence", "sequence_parallel"),
    Technique("stages in turn", "pipeline_model_parallel", _STAGES, least=2),
    Technique("GPipe", "pipeline_afab", _STAGES, least=2),
    Technique("1F1B", "pipeline_1f1b", _STAGES, least=2),
    Technique("interleaved", "pipeline_interleaved", _STAGES, least=2),
    Technique("ZB-H1", "pipeline_zero_bubble", _STAGES, least=2),
    Technique("ZB-V", "pipeline_zero_bubble", f"{_STAGES} --schedule zb_v", least=2),
    Technique("DualPipeV", "pipeline_zero_bubble", f"{_STAGES} --schedule dualpipe_v", least=2),
    Technique("ring attention", "context_ring", "--length 48"),  # that of all other techniques
    Technique("all-to-all attention", "context_all_to_all", "--length 48"),
    EXPERTS,
    Technique("auto", "hybrid", "--config configs/auto.yaml --pattern None", least=2),
)
QUICK = ["vanilla", "naive", "buckets", "zero-3", "tensor", "1f1b", "auto"]


class Job(NamedTuple):
    """Names a cell of the table: a technique on a number of workers, and the link between them."""

    technique: Technique
    workers: int
    link: str

    @property
    def is_baseline(self) -> bool:
        """Return whether other cells are compared with this one."""
        return self.technique == VANILLA or (self.technique == EXPERTS and self.workers == 1)

    def options(self, steps: int) -> list[str]:
        """Return the options of the script."""
        words = shlex.split(self.technique.options)
        if "--config" in words:  # the batch size of a configuration is that of a device
            words += ["--model", SIZE, "--num-gpus", str(self.workers)]
            words += ["--batch-size", str(BATCH_SIZE // self.workers)]
        else:
            words += ["--size", SIZE, "--batch-size", str(BATCH_SIZE)]
        words += [] if self.link == "loopback" else ["--link", self.link]
        return [*words, "--steps", str(steps)]

    def command(self, steps: int) -> str:
        """Return a command that runs the same."""
        options = shlex.join(self.options(steps))
        if self.technique == VANILLA:
            return f"OMP_NUM_THREADS=1 .venv/bin/python {SCRIPTS['vanilla']} {options}"
        return f"make run RUN_MODE={self.technique.run_mode} WORLD_SIZE={self.workers} ARGS='{options}'"


def jobs_of(techniques: Iterable[Technique], workers: Sequence[int], links: Sequence[str]) -> list[Job]:
    """Return the cells of the table that have a meaning.

    One worker sends nothing, so it has no slow link, and there is no pipeline of one stage.
    """
    return [
        Job(technique, number, link)
        for technique in techniques
        for number in ([1] if technique == VANILLA else workers)
        for link in (links if number > 1 else ["loopback"])
        if technique.least <= number
    ]


def measure(jobs: Sequence[Job], runs: int, steps: int) -> dict[Job, list[dict[str, Any]]]:
    """Return the figures of each run of each job."""
    preload("benchmarks.table_runs", *{job.technique.module for job in jobs})
    found: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    order = [jobs[(i + run) % len(jobs)] for run in range(runs) for i in range(len(jobs))]
    for job in track(order, "measuring", console=Console(stderr=True), transient=True):
        found[job].append(run_job(job, steps))
    return found


def run_job(job: Job, steps: int) -> dict[str, Any]:
    """Return the figures of one run: of all ranks together, or of the rank with the largest figure."""
    module, given = job.technique.module, job.options(steps)
    if "--config" not in given:  # else the ranks measure before they can read it
        given = tyro.cli(get_type_hints(importlib.import_module(module).main)["args"], args=given)
    try:
        ranks = run_ranks(_run_rank, job.workers, module, given, timeout=300)
    except RankError as error:
        raise WorkbookError(f"This run has failed: {job.command(steps)}\n{error}") from error
    seconds = (max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)) / 1e9
    tokens = ranks[0]["steps"] * BATCH_SIZE * GPTConfig.named(SIZE).block_size
    figures = {name: max(rank[name] for rank in ranks) for name in MAXIMA}
    return {"tokens_per_second": tokens / seconds, **figures, "plan": ranks[0]["plan"]}


MAXIMA = ("step_seconds", "memory_bytes", "peak_memory_bytes", "bytes_per_step")


def _run_rank(cluster: Cluster, module: str, given: Any) -> dict[str, Any]:
    """Run a script's `main` on this rank, and return its figures.

    `given` has the arguments of `main`, or for a run with a configuration the words of its command line.
    """
    _touch_code()
    caught: list[tuple[dict[str, Any], list[tuple[int, int]]]] = []
    finish = Meter.finish

    def noting(meter: Meter, **extras: Any) -> dict[str, Any]:
        caught.append((finish(meter, **extras), meter.windows))
        return caught[-1][0]

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        args = read_arguments(given, cluster) if isinstance(given, list) else given
        getattr(ctypes.CDLL(None), "malloc_trim", id)(0)  # frees what the planner used; glibc has it
        before = resident_bytes()
        with replaced("lab.trace.meter.Meter.finish", noting):
            importlib.import_module(module).main(cluster, args)
    [(report, windows)] = caught
    timed = windows[min(WARMUP_STEPS, len(windows) // 2) :]
    return {
        "start": timed[0][0],
        "end": timed[-1][1],
        "steps": len(timed),
        "step_seconds": report["step_seconds"],
        "memory_bytes": report["peak_memory_bytes"] - before,
        "peak_memory_bytes": report["peak_memory_bytes"],
        "bytes_per_step": report["bytes_sent"] / report["steps"],
        "plan": {name: value for name, value in report.items() if name.startswith("axis_")},
    }


def _touch_code() -> None:
    """Take a step with a tiny model, so that the memory of torch's code does not count as the training's."""
    model = GPT(GPTConfig.named("tiny"))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
