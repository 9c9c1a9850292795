"""Measure what a right solution costs, and compare it with what is possible: a target beyond correctness.

    bytes, messages, activations, idle time     counted or simulated, so they decide whether a target is met
    time                                        of this machine in this moment, so it is information only

A target runs in the process of the tests, where the learner's function is in its place on every rank, after
all tests have passed. An exercise names its target in the catalog (`beyond`).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm import collectives, cost
from comm.collectives import all_reduce
from comm.cost import Link
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive_grad_accumulation import accumulate
from data_parallel.train_overlap import OverlapDataParallel
from hybrid_parallel import clipping
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner import search as planner
from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.shapes import SHAPES
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import MLP
from lab.models.text import microbatches
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.ledger import LEDGER, Traffic
from lab.trace.memory import live_bytes, saved_activations
from lab.trace.metronome import Metronome
from lab.trace.overlap import overlap_of
from lab.units import MIB, show_bytes
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import stages_per_rank, table_of
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from zero.memory import FORMULAS, Held, formula
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

RANKS, NUMEL = 4, 1_000_000


@dataclass(frozen=True)
class Outcome:
    """Say whether a solution is as good as can be, in a sentence with the numbers."""

    is_met: bool
    sentence: str


def sent(op: str, pattern: str, praise: str) -> Outcome:
    """Compare the bytes and messages of a collective with its formula. The sentence ends in `praise`."""
    found, times = zip(*run_ranks(_count, RANKS, op, pattern), strict=True)
    possible = [cost.traffic(op, pattern, NUMEL, 4, RANKS, rank) for rank in range(RANKS)]
    most, least = _largest(found), _largest(possible)
    is_met = most.bytes_sent <= least.bytes_sent and most.messages_sent <= least.messages_sent
    text = f"For a tensor of {show_bytes(4 * NUMEL)} on {RANKS} ranks a rank sends at most {_shown(most)}"
    sentence = f"{text}, {praise}." if is_met else f"Right, but wasteful: {_lower(text)}; {_shown(least)} do."
    if times[0] is not None:
        sentence += f" Here it takes {times[0]:.1f} times as long as torch's {op.replace('_', '-')}."
    return Outcome(is_met, sentence)


def _count(cluster: Cluster, op: str, pattern: str) -> tuple[Traffic, float | None]:
    """Return what a rank sends in one call and, of an all-reduce, its time as a share of torch's."""
    full = torch.ones(NUMEL)
    shard = torch.ones(len(full.tensor_split(cluster.world_size)[cluster.rank]))
    arguments = {"all_gather": (full, shard), "reduce_scatter": (shard, full)}
    arguments["all_to_all"] = (torch.empty_like(full), full)
    call: Callable[..., Any] = partial(getattr(collectives, op), *arguments.get(op, (full,)))
    LEDGER.clear()
    call(pattern=pattern)
    rows = LEDGER.rows().items()
    traffic = sum((row for entry, row in rows if entry.pattern == pattern), Traffic())
    if op != "all_reduce":
        return traffic, None
    seconds: dict[str, list[float]] = {pattern: [], "torch": []}
    for _ in range(5):
        for each in seconds:
            start = time.perf_counter()
            call(pattern=each)
            seconds[each].append(time.perf_counter() - start)
    return traffic, statistics.median(seconds[pattern]) / statistics.median(seconds["torch"])


def _largest(ranks: Any) -> Traffic:
    return max(ranks, key=lambda traffic: (traffic.bytes_sent, traffic.messages_sent))


def _shown(traffic: Traffic) -> str:
    plural = "" if traffic.messages_sent == 1 else "s"
    return f"{show_bytes(traffic.bytes_sent)} in {traffic.messages_sent} message{plural}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def kept_activations() -> Outcome:
    """Compare what gradient accumulation keeps for its backwards with the activations of one microbatch."""
    model = MLP([256, 256, 256, 10])
    parts = microbatches(torch.ones(32, 256), torch.zeros(32, dtype=torch.int64), 4)
    peaks = []
    for each in (parts[:1], parts):
        kept = _Kept(model)
        with kept:
            accumulate(model, each)
        peaks.append(kept.peak)
    number = round(peaks[1] / peaks[0])
    text = f"at most the activations of {number} of {len(parts)} microbatches are in memory at a time"
    if number == 1:
        return Outcome(True, f"As it should be, {text}.")
    return Outcome(False, f"Right, but wasteful: {text}. Run each backward before the next forward.")


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that autograd keeps, without parameters; `peak` is the most at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda kept: kept.tensor)
        self._parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self.bytes = self.peak = 0

    def _pack(self, tensor: Tensor) -> "_KeptTensor":
        size = 0 if tensor.data_ptr() in self._parameters else tensor.nbytes
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        return _KeptTensor(self, tensor.detach(), size)


@dataclass(eq=False)
class _KeptTensor:
    """A tensor that autograd keeps; it counts until autograd drops it."""

    counter: _Kept
    tensor: Tensor
    size: int

    def __del__(self) -> None:
        self.counter.bytes -= self.size


def hidden(wrapper: Callable[[nn.Module], nn.Module]) -> Outcome:
    """Measure which share of its communication a wrapper hides behind a backward of known length."""
    share = min(run_ranks(_hidden_share, 2, wrapper))
    if share < 0.05:
        return Outcome(False, "Right, but as slow as naive: it hides nothing of its communication.")
    return Outcome(True, f"On a slow link it hides {share:.0%} of its communication behind the backward.")


def _hidden_share(cluster: Cluster, wrapper: Callable[[nn.Module], nn.Module]) -> float:
    layers = nn.ParameterList(torch.zeros(8) for _ in range(4))
    with slow_link.slowed(Link(0.004, 0.0)):
        model: Any = wrapper(Metronome(layers, [[layer] for layer in layers], 0.01, vocab_size=2))
        loss = model(torch.zeros(1, 1)).sum()
        timeline.start_recording()
        with timeline.span("backward", "backward"):
            loss.backward()
        model.finish_gradient_sync()
        timeline.stop_recording()
    return overlap_of(timeline.recorded()).hidden_share or 0.0


def kept_logits() -> Outcome:
    """Compare what the loss keeps for its backward on two ranks with what the full loss keeps."""
    ours = max(run_ranks(_bytes_of_the_loss, 2))
    logits = torch.ones(64, 4096, requires_grad=True)
    with saved_activations(lambda: ()) as full:
        F.cross_entropy(logits, torch.arange(64))
    sizes = show_bytes(ours), show_bytes(full.bytes)
    text = f"for its backward a rank of two keeps {sizes[0]}, and the full loss {sizes[1]}"
    if ours < 0.6 * full.bytes:
        return Outcome(True, f"{text[0].upper()}{text[1:]}.")
    return Outcome(False, f"Right, but wasteful: {text}. Half of that is enough.")


def _bytes_of_the_loss(cluster: Cluster) -> int:
    logits = torch.ones(64, 4096 // cluster.world_size, requires_grad=True)
    with saved_activations(lambda: ()) as saved:
        vocab_parallel_cross_entropy(logits, torch.arange(64))
    return saved.bytes


def sent_and_held(stage: int) -> Outcome:
    """Compare the bytes that a step of ZeRO sends, and those that a rank holds then, with the formulas."""
    ranks = 2
    sent_bytes, held_bytes, full = (
        max(each) for each in zip(*run_ranks(_step_of, ranks, stage), strict=True)
    )
    fewest = full * (3 if stage == 3 else 2) * (ranks - 1) / ranks
    least = sum(astuple(formula(stage, Held(full, full, 2 * full), ranks)))
    text = (
        f"With AdamW on {ranks} ranks a rank sends {sent_bytes / full:.1f} times the parameters' bytes in a "
    )
    text += f"step, and holds {held_bytes / full:.1f} times these bytes"
    if sent_bytes <= fewest and held_bytes <= least:
        return Outcome(True, f"{text} ({FORMULAS[stage]}; without ZeRO it is 4.0).")
    possible = f"{fewest / full:.1f} and {least / full:.1f} are possible"
    return Outcome(False, f"Right, but wasteful: {_lower(text)}; {possible}.")


def _step_of(cluster: Cluster, stage: int) -> tuple[int, int, int]:
    """Return the bytes that this rank sends in a step, those that it holds, and those of the parameters."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    full = sum(parameter.nbytes for parameter in module.parameters())
    before = live_bytes({})["other"] - full
    model: Any = module
    if stage == 3:
        model = FullyShardedDataParallel(module)
        optimizer: Any = torch.optim.AdamW(model.parameters())
    else:
        sharded = {1: ZeroOptimizer, 2: ZeroGradientOptimizer}[stage]
        optimizer = sharded(module.parameters(), torch.optim.AdamW, bucket_mb=full / 4 / MIB)
    LEDGER.clear()
    model(torch.ones(2, 64)).sum().backward()
    (model if stage == 3 else optimizer).finish_gradient_sync()
    optimizer.step()
    moves = [
        (entry, row) for entry, row in LEDGER.rows().items() if entry.op in ("reduce_scatter", "all_gather")
    ]
    sent_bytes = sum(row.bytes_sent for entry, row in moves if entry.pattern != "header")
    steps = [value["step"] for value in optimizer.state.values()]
    return sent_bytes, live_bytes({"steps": steps})["other"] - before, full


def idle_and_held(schedule: str) -> Outcome:
    """Compare a schedule's idle time, and the microbatches that a rank holds, with the formulas."""
    ranks, count, chunks = 4, 8, 2
    stages = ranks * stages_per_rank(schedule, chunks)
    each = ranks / stages
    run = simulate(table_of(schedule, ranks, count, chunks), Costs.equal(stages, each, each, each))
    held = max(theory.held(schedule, ranks, count, chunks, rank) for rank in range(ranks))
    bubble = theory.bubble(schedule, ranks, count, chunks, 1, 1, 1) or 0.0
    text = f"With {ranks} ranks and {count} microbatches, ranks are idle for {run.bubble:.1%} of a step"
    if stages > ranks:
        text += f", and one holds at most {max(run.peak_held)} microbatches of stages of half the size"
    else:
        text += f", and one holds at most {max(run.peak_held)} microbatches"
    if run.bubble < bubble + 1e-9 and max(run.peak_held) <= held:
        return Outcome(True, f"{text}, as the formulas say.")
    return Outcome(False, f"Right, but wasteful: {_lower(text)}; {bubble:.1%} and {held} are possible.")


def speed_of_the_simulator() -> Outcome:
    """Measure how long a large table takes to simulate."""
    table = table_of("1f1b", 64, 256)
    start = time.perf_counter()
    simulate(table, Costs.equal(64, 1, 1, 1))
    actions = sum(map(len, table))
    return Outcome(True, f"It simulates {actions:,} actions in {time.perf_counter() - start:.2f} s.")


def messages_of_clipping() -> Outcome:
    """Compare the messages of clipping with those of one all-reduce of one number along each axis."""
    ours, fewest = (max(each) for each in zip(*run_ranks(_messages, 4), strict=True))
    text = f"for 2 stages of 2 ranks with 6 gradients each, a rank sends {ours} messages"
    if ours <= fewest:
        return Outcome(True, f"As few as can be: {text}, which add up one number along each axis.")
    return Outcome(False, f"Right, but wasteful: {text}; {fewest} do: add up before you communicate.")


def _messages(cluster: Cluster) -> tuple[int, int]:
    mesh = Mesh(cluster, ParallelSizes(pipeline=2, tensor=2))
    axes = [mesh.pipeline, mesh.tensor]
    for axis in axes:
        all_reduce(torch.zeros(()), group=axis)  # the first one in a group may exchange more
    LEDGER.clear()
    clipping.clip_over(axes, [(torch.ones(3), torch.ones(3)) for _ in range(6)], set(), 1.0, None)
    ours = LEDGER.total().messages_sent
    LEDGER.clear()
    for axis in axes:
        all_reduce(torch.zeros((), dtype=torch.float64), group=axis)
    return ours, LEDGER.total().messages_sent


def predictions_of_the_planner() -> Outcome:
    """Compare the number of predicted step times with the number of plans that fit."""
    counted = mock.patch.object(TimeModel, "predict", autospec=True, side_effect=TimeModel.predict)
    with counted as predict:
        found = planner.plans(SHAPES["llama-3-70b"], MACHINES["h100"], 16, 64)
    fit = sum(plan.seconds is not None for plan in found)
    text = f"for Llama 3 70B on 16 devices it predicts the time of {predict.call_count} of {len(found)} plans"
    if predict.call_count <= fit:
        return Outcome(True, f"As few as can be: {text}, those that fit.")
    return Outcome(False, f"Right, but wasteful: {text}; only {fit} fit.")


TARGETS: dict[str, Callable[[], Outcome]] = {
    "bytes of ring reduce_scatter": partial(sent, "reduce_scatter", "ring", "the fewest bytes possible"),
    "bytes of ring all_gather": partial(sent, "all_gather", "ring", "the fewest bytes possible"),
    "bytes of ring all_reduce": partial(sent, "all_reduce", "ring", "the fewest bytes possible"),
    "bytes of halving_doubling": partial(
        sent, "all_reduce", "halving_doubling", "as few bytes as a ring, in fewer messages"
    ),
    "bytes of tree broadcast": partial(
        sent, "broadcast", "tree", "where the root of a flat broadcast sends 12.0 MB in 3"
    ),
    "bytes of all_to_all": partial(sent, "all_to_all", "pairwise", "the fewest bytes possible"),
    "activations of accumulation": kept_activations,
    "hidden by hooks": partial(hidden, OverlapDataParallel),
    "hidden by buckets": partial(hidden, partial(BucketDataParallel, bucket_mb=1e-6)),
    "memory of cross_entropy": kept_logits,
    "bytes of zero1": partial(sent_and_held, 1),
    "bytes of zero2": partial(sent_and_held, 2),
    "bytes of zero3": partial(sent_and_held, 3),
    "idle time of gpipe": partial(idle_and_held, "gpipe"),
    "idle time of 1f1b": partial(idle_and_held, "1f1b"),
    "idle time of interleaved": partial(idle_and_held, "interleaved"),
    "idle time of zb_h1": partial(idle_and_held, "zb_h1"),
    "speed of the simulator": speed_of_the_simulator,
    "messages of clip_on_a_mesh": messages_of_clipping,
    "predictions of choose_a_plan": predictions_of_the_planner,
}
