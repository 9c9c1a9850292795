"""Measure what a right solution costs, and compare it with what is possible: a target beyond correctness.

Bytes, messages, activations and idle time are counted or simulated, so they are the same on every machine.
A target runs in the process of the tests, where the learner's function is in its place on every rank, after
all tests have passed. An exercise names its target in the catalog (`beyond`). Each function imports what it
measures: a rank would need a second to import all lessons.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comm import collectives, cost
from lab.cluster import Cluster
from lab.models.model import MLP
from lab.models.text import microbatches
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from lab.units import show_bytes

RANKS, NUMEL = 4, 1_000_000


@dataclass(frozen=True)
class Outcome:
    """Say whether a solution is as good as can be, in a sentence with the numbers."""

    is_met: bool
    sentence: str


def sent(op: str, pattern: str, praise: str) -> Outcome:
    """Compare the bytes and messages of a collective with its formula. The sentence ends in `praise`."""
    found = run_ranks(_count, RANKS, op, pattern)
    possible = [cost.traffic(op, pattern, NUMEL, 4, RANKS, rank) for rank in range(RANKS)]
    most, least = _largest(found), _largest(possible)
    is_met = most.bytes_sent <= least.bytes_sent and most.messages_sent <= least.messages_sent
    text = f"For a tensor of {show_bytes(4 * NUMEL)} on {RANKS} ranks a rank sends at most {_shown(most)}"
    if is_met:
        return Outcome(True, f"{text}, {praise}.")
    return Outcome(False, f"Right, but wasteful: {_lower(text)}; {_shown(least)} do.")


def _count(cluster: Cluster, op: str, pattern: str) -> Traffic:
    """Return what a rank sends in one call."""
    full = torch.ones(NUMEL)
    shard = torch.ones(len(full.tensor_split(cluster.world_size)[cluster.rank]))
    arguments = {"all_gather": (full, shard), "reduce_scatter": (shard, full)}
    arguments["all_to_all"] = (torch.empty_like(full), full)
    LEDGER.clear()
    getattr(collectives, op)(*arguments.get(op, (full,)), pattern=pattern)
    return sum((row for entry, row in LEDGER.rows().items() if entry.pattern == pattern), Traffic())


def _largest(ranks: Any) -> Traffic:
    return max(ranks, key=lambda traffic: (traffic.bytes_sent, traffic.messages_sent))


def _shown(traffic: Traffic) -> str:
    plural = "" if traffic.messages_sent == 1 else "s"
    return f"{show_bytes(traffic.bytes_sent)} in {traffic.messages_sent} message{plural}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def kept_activations() -> Outcome:
    """Count the microbatches of gradient accumulation whose forward has ended and whose backward has not."""
    from data_parallel.train_naive_grad_accumulation import accumulate

    kept, peaks = Counter[str](), []

    def end_of_forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept["now"] += 1
        peaks.append(kept["now"])
        output.register_hook(lambda gradient: kept.subtract(["now"]))

    model = MLP([256, 256, 256, 10])
    model.register_forward_hook(end_of_forward)
    parts = microbatches(torch.ones(32, 256), torch.zeros(32, dtype=torch.int64), 4)
    accumulate(model, parts, num_targets=32)
    text = f"at most the activations of {max(peaks)} of {len(parts)} microbatches are in memory at a time"
    if max(peaks) == 1:
        return Outcome(True, f"As it should be, {text}.")
    return Outcome(False, f"Right, but wasteful: {text}. Run each backward before the next forward.")


def idle_and_held(schedule: str) -> Outcome:
    """Compare a schedule's idle time, and the microbatches that a rank holds, with the formulas."""
    from pipeline_parallel.analysis import theory
    from pipeline_parallel.analysis.simulate import Costs, simulate
    from pipeline_parallel.schedules import stages_per_rank, table_of

    ranks, count, chunks = 4, 8, 2
    stages = ranks * stages_per_rank(schedule, chunks)
    each = ranks / stages
    run = simulate(table_of(schedule, ranks, count, chunks), Costs.equal(stages, each, each, each))
    held = max(theory.most_held(schedule, ranks, count, chunks, rank) for rank in range(ranks))
    bubble = theory.bubble(schedule, ranks, count, chunks, 1, 1, 1) or 0.0
    text = f"With {ranks} ranks and {count} microbatches, ranks are idle for {run.bubble:.1%} of a step"
    if stages > ranks:
        text += f", and one holds at most {max(run.peak_held)} microbatches of stages of half the size"
    else:
        text += f", and one holds at most {max(run.peak_held)} microbatches"
    if run.bubble < bubble + 1e-9 and max(run.peak_held) <= held:
        return Outcome(True, f"{text}, as the formulas say.")
    return Outcome(False, f"Right, but wasteful: {_lower(text)}; {bubble:.1%} and {held} are possible.")


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
    "idle time of gpipe": partial(idle_and_held, "gpipe"),
    "idle time of 1f1b": partial(idle_and_held, "1f1b"),
    "idle time of interleaved": partial(idle_and_held, "interleaved"),
    "idle time of zb_h1": partial(idle_and_held, "zb_h1"),
}
