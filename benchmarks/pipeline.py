"""Compare our pipelines with torch.distributed.pipelining, naive model parallelism and theory.

    python benchmarks/pipeline.py                    tables; --json for one JSON line
    python benchmarks/pipeline.py --quick            fewer runs and rows: neither memory nor recomputation

2 and 4 ranks train a GPT of 6.4 million parameters, tied, on 8 windows of 128 tokens in 8 microbatches. A
step is the forwards, the backwards, the sum of the tied gradients, and SGD. Both sides have the same stages
(pipeline_parallel/train_torch_pipelining.py), share one process group and take turns, step by step; torch
sends its messages itself. `peak memory above start` is that of a fresh process, without Python and torch.

`1f1b` is compared with `naive`, which is naive model parallelism with the given number of microbatches; 1 is
the full batch at once. Both have 16 windows.

In `makespan` rows a clock replaces computing. On each rank, a microbatch's forward, input gradient and weight
gradient take one tick each, which is long enough for all ranks to send from the same few cores. The makespan
lasts from the start of the first action to the end of the last one, on all ranks. It is compared with the
formula, for these costs and for messages that take no time. These rows also show the bubble, and the expected
bubble in parentheses.

`recompute` is the same schedule, in which a stage keeps only its input. The bytes are the most activations
that a rank held. If a schedule defers weight gradients, they include what these need, with recomputation or
without.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import side_by_side
from benchmarks.side_by_side import Rows, Seconds, medians, new_gpt, row, tokens
from comm import collectives
from lab.cluster import Cluster
from lab.models.model import MLP, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.memory import saved_activations
from pipeline_parallel.actions import placement
from pipeline_parallel.analysis import theory
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import stages_per_rank, table_of
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_torch_pipelining import TorchPipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")
CONFIG = GPTConfig(block_size=128, num_layers=8, num_heads=8, width=256)
MICROBATCHES = 8
TICK = 0.02  # seconds
TOY = 8  # the width of an MLP's layers, for the clock, which needs only their shapes


@dataclasses.dataclass
class Training:
    """Does a training step when called, by a schedule of ours or of torch."""

    schedule: str
    by_torch: bool = False
    microbatches: int = MICROBATCHES
    windows: int = MICROBATCHES  # of text in a step
    recompute: bool = False

    def __post_init__(self) -> None:
        self.x, self.y = tokens(CONFIG, self.windows)
        example = self.x[: self.windows // self.microbatches]
        table = table_of(self.schedule, dist.get_world_size(), self.microbatches)
        model = new_gpt(CONFIG)
        self.pipeline: TorchPipeline | Pipeline
        if self.by_torch:
            rank_of = placement(table)
            stages = balanced_stages(model, len(rank_of))
            self.pipeline = TorchPipeline(stages, self.schedule, self.microbatches, example, rank_of)
        else:
            self.pipeline = Pipeline(model, table, loss_of, example, recompute=self.recompute)
        self.optimizer = torch.optim.SGD(self.pipeline.parameters(), lr=1e-3)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.pipeline.step(self.x, self.y)
        self.pipeline.finish_gradient_sync()
        self.optimizer.step()


def against_torch(cluster: Cluster, runs: int) -> dict[str, Seconds]:
    """Return the seconds of each step of "ours" and "torch" on this rank, by schedule."""
    seconds = {}
    for schedule in SCHEDULES:
        variants = {"ours": Training(schedule), "torch": Training(schedule, by_torch=True)}
        seconds[schedule] = side_by_side.alternate(variants, runs, warmup=1)
    return seconds


def against_naive(cluster: Cluster, microbatches: Sequence[int], runs: int) -> Seconds:
    """Return the seconds of each step of "1f1b", and of "naive 1", which has 1 microbatch, and so on."""
    # Each microbatch of 1f1b has two windows: with one, its matrices would be small, and slower to multiply
    # than those of the full batch.
    windows = 2 * MICROBATCHES
    variants = {"1f1b": Training("1f1b", windows=windows)}
    for m in microbatches:
        variants[f"naive {m}"] = Training("naive", microbatches=m, windows=windows)
    return side_by_side.alternate(variants, runs, warmup=1)


def peak(cluster: Cluster, schedule: str, by_torch: bool) -> int:
    """Return the peak memory of this process in a step, above what it had before the model was made."""
    top, before = side_by_side.peak_of_a_step(cluster, lambda: Training(schedule, by_torch))
    return top - before


def recomputation(cluster: Cluster, schedule: str, runs: int) -> tuple[Seconds, dict[str, int]]:
    """Return the seconds of each step "plain" and with "recompute", and the most activations held."""
    variants = {"plain": Training(schedule), "recompute": Training(schedule, recompute=True)}
    seconds, held = side_by_side.alternate(variants, runs, warmup=1), {}
    for name, training in variants.items():
        with saved_activations(lambda: [training.x, training.y, *training.pipeline.parameters()]) as watch:
            training()
        held[name] = watch.peak_bytes
    return seconds, held


def metronome(cluster: Cluster, schedule: str, microbatches: int, runs: int) -> list[tuple[int, int, int]]:
    """Return for each step by the clock when this rank's actions start and end, and their summed duration.

    Times are nanoseconds of a clock that the processes of a machine share.
    """
    ranks, found = cluster.world_size, []
    model = MLP([TOY] * (1 + ranks * stages_per_rank(schedule)))
    x, y = torch.zeros(microbatches, TOY), torch.zeros(microbatches, dtype=torch.int64)
    pipeline = Pipeline(model, table_of(schedule, ranks, microbatches), loss_of, x[:1], tick=TICK)
    for _ in range(1 + runs):
        collectives.barrier()
        timeline.start_recording()
        pipeline.step(x, y)
        timeline.stop_recording()
        actions = [event for event in timeline.recorded() if "action" in event.args]
        busy = sum(event.duration_ns for event in actions)
        found.append((min(event.start_ns for event in actions), max(e.end_ns for e in actions), busy))
    return found[1:]  # in the first step the ranks connect


def step_rows(ranks: int, runs: int) -> Rows:
    """Return step times of each schedule beside torch's."""
    by_rank = run_ranks(against_torch, ranks, runs, timeout=900)
    by = {schedule: medians([rank[schedule] for rank in by_rank]) for schedule in SCHEDULES}
    return [row(name, "torch", seconds["ours"], seconds["torch"], ranks) for name, seconds in by.items()]


def naive_rows(microbatches: tuple[int, ...], runs: int) -> Rows:
    """Return 1F1B beside naive model parallelism on 2 ranks, for each number of microbatches."""
    seconds = medians(run_ranks(against_naive, 2, microbatches, runs, timeout=900))
    return [
        row("1f1b", "naive", seconds["1f1b"], seconds[f"naive {m}"], 2)
        | {"microbatches": m, "label": f"1f1b ({m} microbatches)"}
        for m in microbatches
    ]


def memory_rows(ranks: int) -> Rows:
    """Return the peak memory of each schedule beside torch's, of the rank that needs most."""
    rows: Rows = []
    for schedule in SCHEDULES:
        ours, theirs = (max(run_ranks(peak, ranks, schedule, by, timeout=300)) for by in (False, True))
        rows.append(row(f"{schedule} peak memory above start", "torch", ours, theirs, ranks, unit="bytes"))
    return rows


def recompute_rows(ranks: int, runs: int) -> Rows:
    """Return the time that recomputation costs and the memory that it saves."""
    rows: Rows = []
    for schedule in SCHEDULES:
        by_rank = run_ranks(recomputation, ranks, schedule, runs, timeout=900)
        seconds = medians([times for times, _ in by_rank])
        held = {name: max(bytes_held[name] for _, bytes_held in by_rank) for name in seconds}
        for unit, by in (("s", seconds), ("bytes", held)):
            sides = by["recompute"], by["plain"]
            rows.append(row(f"{schedule} recompute", schedule, *sides, ranks, unit=unit))
    return rows


def makespan_rows(ranks: int, rounds: tuple[int, ...], runs: int) -> Rows:
    """Return rows for each schedule's makespan by the clock; `rounds` has the microbatches for each rank."""
    rows: Rows = []
    for schedule, m in [(schedule, times * ranks) for schedule in SCHEDULES for times in rounds]:
        makespans, bubbles = [], []
        for beats in zip(*run_ranks(metronome, ranks, schedule, m, runs, timeout=300), strict=True):
            starts, ends, busy = zip(*beats, strict=True)
            makespans.append((max(ends) - min(starts)) / 1e9)
            bubbles.append(1 - sum(busy) / 1e9 / (ranks * makespans[-1]))
        regular = schedule, ranks, m, stages_per_rank(schedule), TICK, TICK, TICK
        seconds, expected = theory.makespan(*regular), theory.bubble(*regular)
        assert seconds is not None, "there is a formula where all ticks are alike"
        one = row(f"{schedule} makespan", "theory", statistics.median(makespans), seconds, ranks)
        bubble = statistics.median(bubbles)
        label = f"{one['what']}, {m} microbatches, bubble {bubble:.3f} ({expected:.3f})"
        more = {"microbatches": m, "bubble": bubble, "bubble_expected": expected}
        rows.append(one | more | {"label": label})
    return rows


def measure(quick: bool) -> Rows:
    # Ours and torch's differ by a few per cent only, so these rows need more runs than the others.
    rows = step_rows(2, 2 if quick else 11) + step_rows(4, 2 if quick else 11)
    if quick:  # with only the faster one of the two naive ways
        return rows + naive_rows((1,), 2) + makespan_rows(4, (1,), 1) + makespan_rows(8, (1,), 1)
    rows += naive_rows((1, MICROBATCHES), 7) + memory_rows(2) + memory_rows(4) + recompute_rows(4, 3)
    return rows + [one for ranks in (2, 4, 8) for one in makespan_rows(ranks, (1, 2, 4), 3)]


def main(args: side_by_side.Args) -> None:
    side_by_side.show("pipeline", measure(args.quick), args, "GPT of 6.4 M parameters")


if __name__ == "__main__":
    side_by_side.start(__file__)
