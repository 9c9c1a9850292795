"""Measure context parallelism: the balance of cuts, ring attention beside its formula, memory, step times.

    python benchmarks/context_parallel.py                 tables; --json for one JSON line
    python benchmarks/context_parallel.py --quick         fewer runs

- `makespan`: forward and backward of ring attention under a causal mask, against the time that a rank would
  take if all computed equally much. A clock replaces computing (context_parallel/clock.py), because more
  ranks than cores would slow each other down.
- `ring`: the same on a slow link, against the formula (context_parallel/makespan.py), where computing takes
  longer than a message, and where it takes less.
- `activations`: what autograd keeps on a rank for 8192 tokens, against one process.
- `formula`, `sent`, `step`: bytes by formula, bytes and seconds of forward, backward and the sum of gradients
  of a GPT with ring attention, with all-to-all attention, and with the sequence parallelism of lesson 3. They
  have the same sequence of T tokens, on both sides of the formulas' crossover. PyTorch has a context
  parallelism of its own, which does not run on CPUs.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.context_parallel_steps import activations, clocked, steps
from benchmarks.side_by_side import medians, row
from comm.wire import slow_link
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.sequence_cut import CUTS
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.ranks.forked import preload

Rows = list[dict[str, Any]]
LINK = "1gbit"
LENGTH, HEADS = 4096, 8  # of the clocked attention; a head has 64 numbers
CONFIG = GPTConfig(block_size=8192, num_layers=2, num_heads=8, width=256)
LENGTHS = [256, 2048]  # of the sequence of a step


@dataclasses.dataclass
class Args:
    """Measure ring attention and all-to-all attention."""

    quick: bool = False
    """Do fewer runs."""
    json: bool = False
    """Print one JSON line instead of a table."""


def makespan_rows(runs: int) -> Rows:
    """Return how much longer each cut takes than a balanced one."""
    rows, ranks, seconds = [], 4, 1.6
    for cut in ("contiguous", "zigzag"):
        measured = medians(run_ranks(clocked, ranks, cut, LENGTH, seconds, 1, "loopback", runs, timeout=300))
        made = CUTS[cut](LENGTH, ranks)
        ideal = 3 * balanced_pairs(made) * seconds / (LENGTH * (LENGTH + 1) / 2)
        rows.append(row(f"makespan {cut}", "balanced", "loopback", measured["ring"], ideal, world_size=ranks))
    return rows


def ring_rows(runs: int, ranks_of_rows: tuple[int, ...]) -> Rows:
    """Return ring attention on a slow link beside its formula."""
    rows, link = [], slow_link.parse(LINK)
    for ranks in ranks_of_rows:
        block = 2 * HEADS * LENGTH // ranks * 64 * 4
        for name, factor in (("compute-bound", 4.0), ("wire-bound", 0.5)):
            # In units of what a message takes, which a block of full attention takes, too, at factor 1.
            seconds = factor * (link.alpha + link.beta * block) * ranks**2 / 2
            pairs = step_pairs(CUTS["zigzag"](LENGTH, ranks))
            per_pair = seconds / (LENGTH * (LENGTH + 1) / 2)
            formula = ring_seconds(pairs, per_pair, block, link)
            arguments = "zigzag", LENGTH, seconds, HEADS, LINK, runs
            measured = medians(run_ranks(clocked, ranks, *arguments, timeout=300))
            rows.append(row(f"ring {name}", "formula", LINK, measured["ring"], formula, world_size=ranks))
    return rows


def activation_rows() -> Rows:
    """Return what autograd keeps on the rank that keeps most, against one process."""
    [alone] = run_ranks(activations, 1, CONFIG, 8192, timeout=300)
    by_rank = run_ranks(activations, 4, CONFIG, 8192, timeout=300)
    return [
        row(
            f"{name} activations",
            "one process",
            "loopback",
            max(rank[name] for rank in by_rank),
            alone["plain"],
            world_size=4,
            unit="bytes",
        )
        for name in ("ring", "all_to_all")
    ]


def step_rows(runs: int, lengths: Sequence[int]) -> Rows:
    """Return bytes and seconds of a GPT's step on both sides of the formulas' crossover."""
    rows: Rows = []
    for ranks in (2, 4):
        for length in lengths:
            config = dataclasses.replace(CONFIG, block_size=length)
            predicted = bytes_by_formula(config, ranks)
            rows += compared(config, ranks, f"T={length}", "sequence_parallel", predicted, runs)
    # Four query heads share a head of keys and values, so on 2 ranks the ring sends less than all-to-alls.
    grouped = dataclasses.replace(CONFIG, block_size=max(lengths), num_kv_heads=CONFIG.num_heads // 4)
    predicted = bytes_by_formula(grouped, 2)
    return rows + compared(grouped, 2, f"T={max(lengths)} grouped", "all_to_all", predicted, runs)


def compared(
    config: GPTConfig, ranks: int, what: str, against: str, predicted: dict[str, float], runs: int
) -> Rows:
    """Return the rows of all techniques against one of them."""
    links = ["loopback", LINK]
    by_rank = run_ranks(steps, ranks, config, links, runs, timeout=600)
    sent = {name: max(bytes_sent[name] for _, bytes_sent in by_rank) for name in predicted}
    kinds = [("formula", "any", predicted, "bytes"), ("sent", "any", sent, "bytes")]
    for i, link in enumerate(links):
        kinds.append(("step", link, medians([seconds[i] for seconds, _ in by_rank]), "s"))
    names = [name for name in ("ring", "all_to_all") if name != against]
    return [
        row(f"{name} {kind} {what}", against, link, by[name], by[against], world_size=ranks, unit=unit)
        for name in names
        for kind, link, by, unit in kinds
    ]


def bytes_by_formula(config: GPTConfig, n: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by the formulas of context_parallel/README.md.

    Sequence parallelism is lesson 3's default, whose backward gathers two times more. What it sends for
    embedding, head and norms is left out.
    """
    tokens, w = config.block_size, config.width
    w_kv = w // config.num_heads * config.kv_heads
    gradients = 2 * sum(parameter.numel() for parameter in GPT(config).parameters())
    layer = {"ring": 6 * tokens * w_kv, "all_to_all": 4 / n * tokens * (w + w_kv)}
    numbers = {name: config.num_layers * each + gradients for name, each in layer.items()}
    numbers["sequence_parallel"] = config.num_layers * 10 * tokens * w
    return {name: 4 * (n - 1) / n * number for name, number in numbers.items()}


def main(args: Args) -> None:
    preload("benchmarks.context_parallel_steps")  # ranks are forked, so they start with all modules imported
    runs = 3 if args.quick else 7
    rows = makespan_rows(2) + ring_rows(2, (4,)) if args.quick else makespan_rows(5) + ring_rows(5, (2, 4))
    rows += [*activation_rows(), *step_rows(runs, LENGTHS[1:] if args.quick else LENGTHS)]
    if args.json:
        side_by_side.show("context_parallel", rows, True, "")
        return
    for ranks in (2, 4):
        shown = [one for one in rows if one["world_size"] == ranks]
        side_by_side.show("context_parallel", shown, False, f"{ranks} ranks")


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
