"""Measure context parallelism: the balance of cuts, ring attention beside its formula, memory, step times.

    python benchmarks/context_parallel.py                 tables; --json for one JSON line
    python benchmarks/context_parallel.py --quick         fewer runs

- `makespan`: forward and backward of ring attention under a causal mask, against the time that a rank would
  take if all computed equally much. A clock replaces computing (context_parallel/clock.py), because more
  ranks than cores would slow each other down.
- `ring`: the same on a slow link, against the formula (context_parallel/makespan.py), where computing takes
  longer than a message, and where it takes less.
- `textbook block`: forward, backward and the sum of gradients of a GPT with ring attention whose blocks are
  plain tensor operations, against PyTorch's fused kernel (context_parallel/block_attention.py).
- `activations`: what autograd keeps on a rank for 8192 tokens, against one process.
- `formula`, `sent`, `step`: bytes by formula, bytes and seconds of forward, backward and the sum of gradients
  of a GPT with ring attention, with all-to-all attention, and with the sequence parallelism of lesson 3. They
  have the same sequence of T tokens, on both sides of the formulas' crossover. PyTorch has a context
  parallelism of its own, which does not run on CPUs.
"""

import dataclasses
from collections.abc import Sequence

import torch

from benchmarks import side_by_side
from benchmarks.side_by_side import Rows, Seconds, Training, bytes_sent_in, medians, row, tokens
from comm.wire import slow_link
from context_parallel.block_attention import KERNELS
from context_parallel.clock import clock
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.parallel_model import ContextParallel, SharedSequence
from context_parallel.sequence_cut import CUTS, SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations
from tensor_parallel.parallelize import parallelize

LINK = "1gbit"
LENGTH, HEADS = 4096, 8  # of the clocked attention; a head has 64 numbers
PAIRS = LENGTH * (LENGTH + 1) / 2  # of queries and keys
CONFIG = GPTConfig(block_size=8192, num_layers=2, num_heads=8, width=256)
LENGTHS = [256, 2048]  # of the sequence of a step
ATTENTIONS = {
    "ring": (ring_attention, SequenceCut.zigzag),
    "all_to_all": (all_to_all_attention, SequenceCut.contiguous),
}


def clocked(cluster: Cluster, cut: str, seconds: float, heads: int, link: str, runs: int) -> Seconds:
    """Return the seconds of ring attention, forward and backward, where a clock replaces computing."""
    sequence = SharedSequence(None, CUTS[cut](LENGTH, cluster.world_size), clock(seconds, LENGTH))
    own = sequence.cut.length(cluster.rank)
    q, k, v = (torch.zeros(1, heads, own, 64, requires_grad=True) for _ in range(3))
    call = {"ring": lambda: ring_attention(q, k, v, sequence).sum().backward()}
    return side_by_side.alternate(call, runs, link, warmup=1)


def steps(cluster: Cluster, config: GPTConfig, runs: int) -> tuple[list[Seconds], dict[str, int]]:
    """Return the seconds of each step of each technique on this rank, for each link, and the bytes of a step.

    A step has one sequence of `config.block_size` tokens.
    """
    models = {name: ContextParallel(GPT(config), *how) for name, how in ATTENTIONS.items()}
    models["sequence_parallel"] = parallelize(GPT(config), sequence_parallel=True)
    variants = {name: Training(model, None, tokens(config, 1)) for name, model in models.items()}
    side_by_side.alternate(variants, 0, warmup=1)
    sent = {name: bytes_sent_in(variant) for name, variant in variants.items()}
    return [side_by_side.alternate(variants, runs, link, warmup=1) for link in ("loopback", LINK)], sent


def kernels(cluster: Cluster, config: GPTConfig, runs: int) -> Seconds:
    """Return the seconds of each step of ring attention with each kernel on this rank."""
    how = ATTENTIONS["ring"]
    models = {name: ContextParallel(GPT(config), *how, kernel) for name, kernel in KERNELS.items()}
    variants = {name: Training(model, None, tokens(config, 1)) for name, model in models.items()}
    return side_by_side.alternate(variants, runs, warmup=1)


def activations(cluster: Cluster, name: str) -> int:
    """Return the bytes that autograd keeps on this rank for the backward of one sequence."""
    x, y = tokens(CONFIG, 1)
    model = GPT(CONFIG) if name == "one process" else ContextParallel(GPT(CONFIG), *ATTENTIONS[name])
    with saved_activations(model.parameters) as saved:
        getattr(model, "loss", loss_of)(model(x), y)
    return saved.bytes


def makespan_rows(runs: int) -> Rows:
    """Return how much longer each cut takes than a balanced one."""
    rows, ranks, seconds = [], 4, 1.6
    for cut in ("contiguous", "zigzag"):
        measured = medians(run_ranks(clocked, ranks, cut, seconds, 1, "loopback", runs, timeout=300))
        ideal = 3 * balanced_pairs(CUTS[cut](LENGTH, ranks)) * seconds / PAIRS
        rows.append(row(f"makespan {cut}", "balanced", measured["ring"], ideal, ranks))
    return rows


def ring_rows(runs: int, ranks: int) -> Rows:
    """Return ring attention on a slow link beside its formula."""
    rows, link = [], slow_link.parse(LINK)
    block = 2 * HEADS * LENGTH // ranks * 64 * 4
    for name, factor in (("compute-bound", 4.0), ("wire-bound", 0.5)):
        # In units of what a message takes, which a block of full attention takes, too, at factor 1.
        seconds = factor * (link.alpha + link.beta * block) * ranks**2 / 2
        formula = ring_seconds(step_pairs(CUTS["zigzag"](LENGTH, ranks)), seconds / PAIRS, block, link)
        measured = medians(run_ranks(clocked, ranks, "zigzag", seconds, HEADS, LINK, runs, timeout=300))
        rows.append(row(f"ring {name}", "formula", measured["ring"], formula, ranks, LINK))
    return rows


def kernel_rows(runs: int, lengths: Sequence[int]) -> Rows:
    """Return the step with the textbook's block, against that with the fused kernel."""
    rows = []
    for ranks in (2, 4):
        for length in lengths:
            config = dataclasses.replace(CONFIG, block_size=length)
            by = medians(run_ranks(kernels, ranks, config, runs, timeout=600))
            rows.append(row(f"textbook block T={length}", "fused", by["textbook"], by["fused"], ranks))
    return rows


def activation_rows() -> Rows:
    """Return what autograd keeps on the rank that keeps most, against one process."""
    [alone] = run_ranks(activations, 1, "one process", timeout=300)
    most = {name: max(run_ranks(activations, 4, name, timeout=300)) for name in ATTENTIONS}
    return [
        row(f"{name} activations", "one process", held, alone, 4, unit="bytes") for name, held in most.items()
    ]


def step_rows(runs: int, lengths: Sequence[int]) -> Rows:
    """Return bytes and seconds of a GPT's step on both sides of the formulas' crossover."""
    rows: Rows = []
    for ranks in (2, 4):
        for length in lengths:
            config = dataclasses.replace(CONFIG, block_size=length)
            rows += compared(config, ranks, f"T={length}", "sequence_parallel", runs)
    # Four query heads share a head of keys and values, so on 2 ranks the ring sends less than all-to-alls.
    grouped = dataclasses.replace(CONFIG, block_size=max(lengths), num_kv_heads=CONFIG.num_heads // 4)
    return rows + compared(grouped, 2, f"T={max(lengths)} grouped", "all_to_all", runs)


def compared(config: GPTConfig, ranks: int, what: str, against: str, runs: int) -> Rows:
    """Return the rows of all techniques against one of them."""
    by_rank = run_ranks(steps, ranks, config, runs, timeout=600)
    predicted = bytes_by_formula(config, ranks)
    sent = {name: max(bytes_sent[name] for _, bytes_sent in by_rank) for name in predicted}
    loopback, slow = (medians([seconds[i] for seconds, _ in by_rank]) for i in (0, 1))
    kinds = [("formula", "any", predicted, "bytes"), ("sent", "any", sent, "bytes")]
    kinds += [("step", "loopback", loopback, "s"), ("step", LINK, slow, "s")]
    return [
        row(f"{name} {kind} {what}", against, by[name], by[against], ranks, link, unit)
        for name in ATTENTIONS
        for kind, link, by, unit in kinds
        if name != against
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


def main(args: side_by_side.Args) -> None:
    if args.quick:
        rows = makespan_rows(2) + ring_rows(2, 4) + activation_rows() + step_rows(3, LENGTHS[1:])
    else:
        rows = makespan_rows(5) + ring_rows(5, 2) + ring_rows(5, 4) + kernel_rows(9, [256, 1024, 2048])
        rows += activation_rows() + step_rows(7, LENGTHS)
    side_by_side.show("context_parallel", rows, args, "attention on divided sequences")


if __name__ == "__main__":
    side_by_side.start(__file__)
