"""Run the ranks' part of benchmarks/pipeline.py: steps of each schedule, by ours, by torch and by a clock."""

import copy
import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import side_by_side
from comm import collectives
from lab.cluster import Cluster
from lab.models.model import GPT, MLP, GPTConfig, loss_of
from lab.trace import meter, timeline
from lab.trace.memory import held_activations
from pipeline_parallel.actions import num_microbatches, placement
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import stages_per_rank, table_of
from pipeline_parallel.train_torch_pipelining import TorchSchedule

CONFIG = GPTConfig(block_size=128, num_layers=8, num_heads=8, width=256)
MICROBATCHES = 8
TOY = 8  # the width of an MLP's layers, for the clock, which needs only their shapes
By = dict[str, list[float]]


def text(windows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (windows, CONFIG.block_size + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


@functools.cache
def model_as_made() -> GPT:
    """Return the model; copying it is faster than making it again."""
    return GPT(CONFIG)


@dataclasses.dataclass
class Training:
    """Does a training step when called, by a schedule of ours or of torch."""

    schedule: str
    by_torch: bool = False
    microbatches: int = MICROBATCHES
    windows: int = MICROBATCHES  # of text in a step
    recompute: bool = False
    alone: bool = False  # the only training of this process, so the model need not be a copy

    def __post_init__(self) -> None:
        self.x, self.y = text(self.windows)
        example = self.x[: self.windows // self.microbatches]
        table = table_of(self.schedule, dist.get_world_size(), self.microbatches)
        model = GPT(CONFIG) if self.alone else copy.deepcopy(model_as_made())
        self.pipeline: OwnStages
        if self.by_torch:
            sizes = placement(table), num_microbatches(table)
            self.pipeline = OwnStages(model, *sizes, loss_of, example)
            self.step = TorchSchedule(self.pipeline, self.schedule).step
        else:
            self.pipeline = pipeline = Pipeline(model, table, loss_of, example, recompute=self.recompute)
            self.step = pipeline.step
        self.optimizer = torch.optim.SGD(self.pipeline.parameters(), lr=1e-3)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.step(self.x, self.y)
        self.pipeline.finish_gradient_sync()
        self.optimizer.step()


def against_torch(cluster: Cluster, schedules: Sequence[str], runs: int, warmup: int) -> dict[str, By]:
    """Return the seconds of each step of "ours" and "torch" on this rank, by schedule."""
    seconds = {}
    for schedule in schedules:
        variants = {"ours": Training(schedule), "torch": Training(schedule, by_torch=True)}
        seconds[schedule] = side_by_side.alternate(variants, runs, warmup=warmup)
    return seconds


def against_naive(cluster: Cluster, microbatches: Sequence[int], runs: int, warmup: int) -> By:
    """Return the seconds of each step of "1f1b", and of "naive 1", which has 1 microbatch, and so on."""
    # Each microbatch of 1f1b has two windows: with one, its matrices would be small, and slower to multiply
    # than those of the full batch.
    windows = 2 * MICROBATCHES
    variants = {"1f1b": Training("1f1b", windows=windows)}
    for m in microbatches:
        variants[f"naive {m}"] = Training("naive", microbatches=m, windows=windows)
    return side_by_side.alternate(variants, runs, warmup=warmup)


def peak(cluster: Cluster, schedule: str, by_torch: bool) -> tuple[int, int]:
    """Return the peak memory of this process in a step, and what it had before the model was made."""
    # glibc keeps what is freed unless it is mapped on its own, and would hide what a step really needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    meter.reset_peak_memory(cluster.device)
    before = meter.peak_memory(cluster.device)
    training = Training(schedule, by_torch, alone=True)
    training()
    meter.reset_peak_memory(cluster.device)
    training()
    return meter.peak_memory(cluster.device), before


def recomputation(
    cluster: Cluster, schedules: Sequence[str], runs: int, warmup: int
) -> dict[str, tuple[By, dict[str, int]]]:
    """Return, by schedule, the seconds of each step "plain" and with "recompute", and the most activations
    held.
    """
    results = {}
    for schedule in schedules:
        variants = {"plain": Training(schedule), "recompute": Training(schedule, recompute=True)}
        seconds = side_by_side.alternate(variants, runs, warmup=warmup)
        held = {}
        for name, training in variants.items():
            ignored = [training.x, training.y, *training.pipeline.parameters()]
            with held_activations(ignored) as watch:
                training()
            held[name] = watch.peak_bytes
        results[schedule] = seconds, held
    return results


class Beat(NamedTuple):
    """Holds one rank's times in a step by the clock: start and end of its actions, and their summed duration.

    Times are nanoseconds of a clock that the processes of a machine share.
    """

    start: int
    end: int
    busy: int


def metronome(cluster: Cluster, plan: Sequence[tuple[str, int]], tick: float, runs: int) -> list[list[Beat]]:
    """Return this rank's part of each step, for each schedule and number of microbatches."""
    _beats(cluster, *plan[0], 1e-3, 1)  # a first step, in which the ranks connect
    return [_beats(cluster, schedule, microbatches, tick, runs) for schedule, microbatches in plan]


def _beats(cluster: Cluster, schedule: str, microbatches: int, tick: float, runs: int) -> list[Beat]:
    ranks = cluster.world_size
    model = MLP([TOY] * (1 + ranks * stages_per_rank(schedule)))
    x, y = torch.zeros(microbatches, TOY), torch.zeros(microbatches, dtype=torch.int64)
    pipeline = Pipeline(model, table_of(schedule, ranks, microbatches), loss_of, x[:1], tick=tick)
    return [_beat(pipeline, x, y) for _ in range(runs)]


def _beat(pipeline: Pipeline, x: Tensor, y: Tensor) -> Beat:
    collectives.barrier()
    timeline.start_recording()
    pipeline.step(x, y)
    timeline.stop_recording()
    actions = [event for event in timeline.recorded() if "action" in event.args]
    return Beat(
        min(event.start_ns for event in actions),
        max(event.end_ns for event in actions),
        sum(event.duration_ns for event in actions),
    )
