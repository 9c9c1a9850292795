"""Run the techniques of benchmarks/table.py: each by its own train script, whose report is caught.

Every run is a job of new processes, so no run finds memory or caches that another one has left. All jobs take
turns, so other load on the machine slows all of them:

      round 1   naive 2 loopback | naive 2 1gbit | naive 4 loopback | ... | 1F1B 2 loopback | ...
      round 2   naive 2 1gbit | naive 4 loopback | ...                             and so on, one further

The tokens per second of a run are those of the global batch, from the moment when the first rank began its
first timed step to the moment when the last rank ended its last one, on one clock (lab/trace/timeline.py).
"""

import importlib
import io
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple, get_type_hints

import torch
import tyro

from expert_parallel.config import MoEConfig
from hybrid_parallel.planner.auto import read_arguments
from lab.cluster import Cluster
from lab.launch.allocator import return_freed_memory
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import RankError, run_ranks
from lab.ranks.forked import preload
from lab.replace import replaced
from lab.trace import timeline
from lab.trace.memory import resident_bytes
from lab.trace.meter import Meter
from training.run import WARMUP_STEPS

SIZE, BATCH_SIZE, STEPS, RUNS = "8layers", 16, 4, 5
LINKS = ("loopback", "1gbit")
WORKERS = (1, 2, 4)
_TIMEOUT = 300.0  # seconds of a job


class Technique(NamedTuple):
    """Holds a row of the table: a script with its options, and the least and largest number of workers.

    Where `is_other_model`, the script trains another model than vanilla, so the table compares it with its
    own run on one worker.
    """

    name: str
    run_mode: str
    script: str
    options: str = ""
    least: int = 2
    most: int = 1 << 20
    is_other_model: bool = False

    @property
    def is_pipeline(self) -> bool:
        return self.script.startswith("pipeline_parallel/")


VANILLA = Technique("vanilla", "vanilla", "benchmarks/vanilla.py", least=1, most=1)
_DATA, _PIPELINE = "data_parallel/train_", "pipeline_parallel/train_"
_STAGES = "--layers 8 --microbatches 8"
_LENGTH = "--length 48"  # that of all other techniques
MOE = MoEConfig(num_experts=8, top_k=2)
TECHNIQUES = (
    VANILLA,
    Technique("naive", "data_parallel_naive", f"{_DATA}naive.py", least=1),
    Technique("naive ring", "data_parallel_naive", f"{_DATA}naive.py", "--pattern ring"),
    Technique("naive tree", "data_parallel_naive", f"{_DATA}naive.py", "--pattern tree"),
    Technique("overlap", "data_parallel_overlap", f"{_DATA}overlap.py", least=1),
    Technique("buckets", "data_parallel_bucket_overlap", f"{_DATA}bucket_overlap.py", least=1),
    Technique("DDP", "data_parallel_ddp", f"{_DATA}ddp.py", least=1),
    Technique("ZeRO 1", "zero1", "zero/train_zero1.py", least=1),
    Technique("ZeRO 2", "zero2", "zero/train_zero2.py", least=1),
    Technique("ZeRO 3", "zero3", "zero/train_zero3.py", least=1),
    Technique("FSDP", "fsdp", "zero/train_fsdp.py", least=1),
    Technique("tensor", "tensor_parallel", "tensor_parallel/train_tensor_parallel.py", least=1),
    Technique("sequence", "sequence_parallel", "tensor_parallel/train_sequence_parallel.py", least=1),
    Technique("stages in turn", "pipeline_model_parallel", f"{_PIPELINE}model_parallel.py", _STAGES),
    Technique("GPipe", "pipeline_afab", f"{_PIPELINE}afab.py", _STAGES),
    Technique("1F1B", "pipeline_1f1b", f"{_PIPELINE}1f1b.py", _STAGES),
    Technique("interleaved", "pipeline_interleaved", f"{_PIPELINE}interleaved.py", _STAGES),
    Technique("ZB-H1", "pipeline_zero_bubble", f"{_PIPELINE}zero_bubble.py", _STAGES),
    Technique("ZB-V", "pipeline_zero_bubble", f"{_PIPELINE}zero_bubble.py", f"{_STAGES} --schedule zb_v"),
    Technique("ring attention", "context_ring", "context_parallel/train_ring_attention.py", _LENGTH, least=1),
    Technique(
        "all-to-all attention",
        "context_all_to_all",
        "context_parallel/train_all_to_all_attention.py",
        _LENGTH,
        least=1,
    ),
    Technique(
        "experts",
        "expert_parallel",
        "expert_parallel/train_moe.py",
        f"--experts {MOE.num_experts} --top-k {MOE.top_k}",
        least=1,
        is_other_model=True,
    ),
    Technique(
        "auto", "hybrid", "hybrid_parallel/train_hybrid.py", "--config configs/auto.yaml --pattern None"
    ),
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
        return self.technique == VANILLA or (self.technique.is_other_model and self.workers == 1)

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
            return f"OMP_NUM_THREADS=1 .venv/bin/python {VANILLA.script} {options}"
        return f"make run RUN_MODE={self.technique.run_mode} WORLD_SIZE={self.workers} ARGS='{options}'"


def jobs_of(techniques: Iterable[Technique], workers: Sequence[int], links: Sequence[str]) -> list[Job]:
    """Return the cells of the table that have a meaning.

    One worker sends nothing, so it has no slow link, and there is no pipeline of one stage.
    """
    return [
        Job(technique, number, link)
        for technique in techniques
        for number in workers
        for link in (links if number > 1 else ["loopback"])
        if technique.least <= number <= technique.most
    ]


def measure(
    jobs: Sequence[Job], runs: int, steps: int, report: Callable[[Job], object] = lambda job: None
) -> dict[Job, list[dict[str, Any]]]:
    """Return the figures of each run of each job. `report` is called before each run."""
    preload("benchmarks.table_runs", *{module_of(job.technique) for job in jobs})
    found: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    for run in range(runs):
        for i in range(len(jobs)):
            job = jobs[(i + run) % len(jobs)]
            report(job)
            found[job].append(run_job(job, steps))
    return found


def run_job(job: Job, steps: int) -> dict[str, Any]:
    """Return the figures of one run: of all ranks together, or of the rank with the largest figure."""
    module, given = module_of(job.technique), job.options(steps)
    if "--config" not in given:  # else the ranks measure before they can read it
        given = tyro.cli(get_type_hints(importlib.import_module(module).main)["args"], args=given)
    try:
        ranks = run_ranks(_run_rank, job.workers, module, given, timeout=_TIMEOUT)
    except RankError as error:
        raise WorkbookError(f"This run has failed: {job.command(steps)}\n{error}") from error
    seconds = (max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)) / 1e9
    figures = {
        "tokens_per_second": tokens_per_step() * ranks[0]["steps"] / seconds,
        **{name: max(rank[name] for rank in ranks) for name in MAXIMA},
    }
    return figures | {"plan": ranks[0]["plan"]}


MAXIMA = ("step_seconds", "memory_bytes", "peak_memory_bytes", "bytes_per_step")


def tokens_per_step() -> int:
    """Return the number of tokens of the global batch."""
    return BATCH_SIZE * GPTConfig.named(SIZE).block_size


def module_of(technique: Technique) -> str:
    return technique.script.removesuffix(".py").replace("/", ".")


def _run_rank(cluster: Cluster, module: str, given: Any) -> dict[str, Any]:
    """Run a script's `main` on this rank, and return its figures. Times are on rank 0's clock.

    `given` has the arguments of `main`, or for a run with a configuration the words of its command line.
    """
    _touch_code()
    offset = timeline.align(cluster, rounds=2)
    caught: list[tuple[dict[str, Any], list[tuple[int, int]]]] = []
    finish = Meter.finish

    def noting(meter: Meter, **extras: Any) -> dict[str, Any]:
        caught.append((finish(meter, **extras), meter.windows))
        return caught[-1][0]

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        args = read_arguments(given, cluster) if isinstance(given, list) else given
        return_freed_memory()  # the planner has measured this machine
        before = resident_bytes()
        with replaced("lab.trace.meter.Meter.finish", noting):
            importlib.import_module(module).main(cluster, args)
    [(report, windows)] = caught
    timed = windows[min(WARMUP_STEPS, len(windows) // 2) :]
    return {
        "start": timed[0][0] + offset,
        "end": timed[-1][1] + offset,
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
