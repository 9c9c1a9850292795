"""Measure expert parallelism against data parallelism whose ranks all hold all experts; draw the balance.

    python benchmarks/expert_parallel.py                 tables; --json for one JSON line
    python benchmarks/expert_parallel.py --quick         4 ranks only, fewer sizes and runs
    python benchmarks/expert_parallel.py --plot FILE     which experts the tokens choose, and no table

A layer has 8 experts of width d, and each rank has t tokens that pass 2 of them. Both sides run the same code
with the same tokens and weights. `expert_parallel` divides the experts among the ranks and sends tokens.
`replicated` is the same with --expert-ranks 1: every rank holds all experts and averages their gradients.

- `formula`: the bytes that a rank sends for the experts of a layer, if all experts are chosen equally. The
  ratio is t k / (4 E d): below 1 expert parallelism sends less.
- `sent`: the bytes of a whole step, for the rank that sends most, with the experts that its tokens chose and
  the gradients of everything that is not an expert.
- `step`: forward, backward and the averages of gradients. No optimizer runs. On replicas it would update
  all experts on every rank, which takes longer.

For the picture 4 ranks train the same GPT three times in one process group: with `--balance none`, `aux` and
`bias` of lesson 7. A panel of lines is one training, and a line is one expert: its fraction of all choices of
a step. The block is that with the busiest expert at the end of the training without balancing. The last panel
shows where the tokens of each rank go in the last step of that training.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks import side_by_side
from benchmarks.side_by_side import Rows, Seconds, Training, medians, row
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.traffic import tokens_between
from expert_parallel.train_moe import Args as TrainArgs
from expert_parallel.train_moe import ExpertParallel
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, rank_slice
from lab.ranks import run_ranks
from lab.trace.gantt import COLORS, readable_on

CONFIG = GPTConfig(block_size=256, num_layers=2, num_heads=4)
MOE = MoEConfig(num_experts=8, top_k=2)
LINKS = ["loopback", "1gbit"]
# (d, t): the two sides send equally much if t = 16 d.
SIZES = [(64, 256), (64, 1024), (64, 4096), (128, 512), (256, 512)]
QUICK = [(64, 1024), (64, 4096), (256, 512)]
WAYS = {"none": "no balancing", "aux": "a term of the loss (aux)", "bias": "a bias of the choice (bias)"}
PLOT_RANKS, PLOT_STEPS = 4, 200
LINE_COLORS = ["communication", "compute", "backward", "optimizer", "data", "forward", "launch", "wait"]


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare divided experts with experts on every rank."""

    plot: Path | None = None
    """Draw which experts the tokens choose into this file (png or svg), and measure nothing else."""


def steps(
    cluster: Cluster, sizes: Sequence[tuple[int, int]], runs: int
) -> list[tuple[dict[str, int], list[Seconds]]]:
    """Return for each (width, tokens of a rank) the bytes that this rank sends in a step, and the seconds.

    The seconds are those of each step of both variants, for each link. No weight changes between steps, so
    the routers decide the same in all of them, and in both variants.
    """
    variants = {"expert_parallel": form_groups(cluster.world_size), "replicated": form_groups(1)}
    corpus, found = load_corpus(), []
    for width, tokens in sizes:
        config = dataclasses.replace(CONFIG, width=width)
        batch = global_batch(corpus, cluster.rank, 0, tokens // config.block_size, config.block_size)
        models = {name: ExpertParallel(GPT(config), MOE, groups) for name, groups in variants.items()}
        calls = {name: Training(model, None, batch) for name, model in models.items()}
        seconds = [side_by_side.alternate(calls, runs, link, warmup=1) for link in LINKS]
        found.append(({name: model.traffic().bytes_sent for name, model in models.items()}, seconds))
    return found


def formula(width: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank sends for the experts of a layer: as tokens, and as gradients."""
    as_tokens = 4 * tokens * MOE.top_k * width * (ranks - 1) // ranks
    as_gradients = 2 * MOE.num_experts * 8 * width**2 * (ranks - 1) // ranks
    return 4 * as_tokens, 4 * as_gradients


def rows_of(ranks: int, sizes: list[tuple[int, int]], runs: int) -> Rows:
    """Return the rows of each size on this number of ranks."""
    rows: Rows = []
    names = ("expert_parallel", "replicated")
    by_rank = run_ranks(steps, ranks, sizes, runs, timeout=600)
    for (width, tokens), results in zip(sizes, zip(*by_rank, strict=True), strict=True):
        where = f"d={width} t={tokens}"
        most = [max(sent[name] for sent, _ in results) for name in names]
        for what, sides in (("formula", formula(width, tokens, ranks)), ("sent", most)):
            rows.append(row(f"{what} {where}", names[1], *sides, ranks, "any", unit="bytes"))
        for i, link in enumerate(LINKS):
            seconds = medians([times[i] for _, times in results])
            rows.append(row(f"step {where}", names[1], *(seconds[name] for name in names), ranks, link))
    return rows


def train(cluster: Cluster, steps: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each way of balancing how many tokens chose each expert, by (step, block, expert).

    And return the last step's dispatch, by (block, from rank, to rank).
    """
    options, config, corpus = TrainArgs(), GPTConfig.named("tiny"), load_corpus()
    found = {}
    for way in WAYS:
        model = ExpertParallel(GPT(config), MOE, form_groups(cluster.world_size), options.seed)
        optimizer, chosen = torch.optim.AdamW(model.parameters(), lr=options.lr), []
        for step in range(steps):
            batch = global_batch(corpus, options.seed, step, options.batch_size, config.block_size)
            x, y = (rank_slice(part, cluster.rank, cluster.world_size) for part in batch)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            if way == "aux":
                loss = loss + options.aux_weight * model.auxiliary_loss()
            loss.backward()
            model.finish_gradient_sync()
            optimizer.step()
            if way == "bias":
                model.move_biases(options.bias_rate)
            chosen.append(torch.stack([layer.chosen_rE.sum(0) for layer in model.layers]))
        between = [tokens_between(layer.sent_rE, model.groups) for layer in model.layers]
        found[way] = torch.stack(chosen), torch.stack(between)
    return found


def draw_lines(axes: Any, chosen_sE: Tensor, title: str) -> None:
    """Draw a line for each expert: its fraction of the choices of a step."""
    fractions_sE = chosen_sE.double() / chosen_sE.sum(1, keepdim=True)
    for expert, kind in enumerate(LINE_COLORS):
        axes.plot(fractions_sE[:, expert], color=COLORS[kind], linewidth=1.4, label=f"expert {expert}")
    mean = 1 / chosen_sE.shape[1]
    axes.axhline(mean, color="#444444", linewidth=0.9, linestyle="--", label="equal")
    busiest = float(fractions_sE[-1].max()) / mean
    axes.set_title(f"{title}\nbusiest at the end: {busiest:.1f} x the mean", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_dispatch(axes: Any, between_rr: Tensor) -> None:
    """Draw how many tokens each rank sends to each, as a matrix with numbers."""
    image = axes.imshow(between_rr, cmap="cividis", vmin=0)
    for source, targets in enumerate(between_rr.tolist()):
        for target, tokens in enumerate(targets):
            color = readable_on(image.cmap(image.norm(tokens))[:3])
            axes.text(target, source, tokens, ha="center", va="center", fontsize=10, color=color)
    ranks = range(len(between_rr))
    axes.set(xticks=ranks, yticks=ranks, xlabel="to the experts of rank", ylabel="from rank")
    axes.set_title("dispatch, last step of no balancing\n(choices of tokens)", fontsize=10)


def plot(results: dict[str, tuple[Tensor, Tensor]], file: Path) -> None:
    """Draw the three trainings and the dispatch beside each other."""
    chosen_sbE, between_brr = results["none"]
    block = int(chosen_sbE[-1].max(1).values.argmax())
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=(1, 1, 1, 0.95))
    for axes, (way, title) in zip(panels, WAYS.items(), strict=False):
        draw_lines(axes, results[way][0][:, block], title)
        axes.sharey(panels[0])
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("fraction of all choices")
    draw_dispatch(panels[3], between_brr[block])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=9, frameon=False, fontsize=9)
    figure.suptitle(f"Tokens of 8 experts in block {block}", fontsize=11)
    figure.savefig(file, dpi=110)


def main(args: Args) -> None:
    if args.plot is not None:
        plot(run_ranks(train, PLOT_RANKS, PLOT_STEPS, timeout=600)[0], args.plot)
        return
    rows = rows_of(4, QUICK, 3) if args.quick else rows_of(2, SIZES, 7) + rows_of(4, SIZES, 7)
    side_by_side.show("expert_parallel", rows, args, "expert_parallel against replicated")


if __name__ == "__main__":
    side_by_side.start(__file__)
