"""Draw which experts the tokens choose, step after step, for each way of balancing.

    python benchmarks/expert_balance.py --plot expert_parallel/balance.png

The same GPT is trained three times in one process group: with `--balance none`, `aux` and `bias` of lesson 7.
A panel of lines is one training, and a line is one expert: its fraction of all choices of a step. The block
is that with the busiest expert at the end of the training without balancing. The last panel shows where the
tokens of each rank go in the last step of that training.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which expert_parallel.py would hide the package of the same name

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.side_by_side import leave_gloo_as_it_is
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.expected_traffic import tokens_between
from expert_parallel.train_moe import Args as TrainArgs
from expert_parallel.train_moe import ExpertParallel
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, rank_slice
from lab.ranks import run_ranks
from lab.trace.gantt import COLORS, readable_on
from training.arguments import Size

WAYS = {"none": "no balancing", "aux": "a term of the loss (aux)", "bias": "a bias of the choice (bias)"}
LINE_COLORS = [COLORS[kind] for kind in ("communication", "compute", "backward", "optimizer", "data")]
LINE_COLORS += [COLORS["forward"], COLORS["launch"], COLORS["wait"]]


@dataclasses.dataclass
class Args:
    """Draw which experts the tokens choose, step after step, for each way of balancing."""

    plot: Path
    """File for the picture (png or svg)."""
    world_size: int = 4
    """Number of ranks: 1, 2, 4 or 8. The 8 experts of a block are divided among them."""
    steps: int = 200
    """Number of steps of each training."""
    size: Size = "tiny"
    """Size of the GPT (lab/models/model.py)."""


def train(cluster: Cluster, way: str, size: Size, steps: int) -> tuple[Tensor, Tensor]:
    """Return how many tokens chose each expert, by (step, block, expert), and the last step's dispatch.

    The dispatch counts by (block, from rank, to rank).
    """
    options = TrainArgs()
    config = GPTConfig.named(size)
    model = ExpertParallel(GPT(config), MoEConfig(), form_groups(cluster.world_size), options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    corpus, chosen = load_corpus(), []
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
    return torch.stack(chosen), torch.stack(between)


def measure(cluster: Cluster, size: Size, steps: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the result of `train` for each way of balancing."""
    return {way: train(cluster, way, size, steps) for way in WAYS}


def draw_lines(axes: Any, chosen_sE: Tensor, title: str) -> None:
    """Draw a line for each expert: its fraction of the choices of a step."""
    fractions_sE = chosen_sE.double() / chosen_sE.sum(1, keepdim=True)
    for expert, color in enumerate(LINE_COLORS):
        axes.plot(fractions_sE[:, expert], color=color, linewidth=1.4, label=f"expert {expert}")
    mean = 1 / chosen_sE.shape[1]
    axes.axhline(mean, color="#444444", linewidth=0.9, linestyle="--", label="equal")
    busiest = float(fractions_sE[-1].max()) / mean
    axes.set_title(f"{title}\nbusiest at the end: {busiest:.1f} x the mean", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_dispatch(axes: Any, between_rr: Tensor, title: str) -> None:
    """Draw how many tokens each rank sends to each, as a matrix with numbers."""
    image = axes.imshow(between_rr, cmap="cividis", vmin=0)
    for source, row in enumerate(between_rr.tolist()):
        for target, tokens in enumerate(row):
            color = image.cmap(image.norm(tokens))[:3]
            axes.text(target, source, tokens, ha="center", va="center", fontsize=10, color=readable_on(color))
    ranks = range(len(between_rr))
    axes.set(xticks=ranks, yticks=ranks, xlabel="to the experts of rank", ylabel="from rank")
    axes.set_title(title, fontsize=10)


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
    draw_dispatch(panels[3], between_brr[block], "dispatch, last step of no balancing\n(choices of tokens)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=9, frameon=False, fontsize=9)
    figure.suptitle(f"Tokens of 8 experts in block {block}", fontsize=11)
    figure.savefig(file, dpi=110)


def main(args: Args) -> None:
    if args.world_size not in (1, 2, 4, 8):
        raise SystemExit(f"--world-size {args.world_size}: choose 1, 2, 4 or 8 for the 8 experts.")
    if args.steps < 1:
        raise SystemExit(f"--steps {args.steps}: choose at least one step.")
    if not args.plot.parent.is_dir():
        raise SystemExit(f"--plot {args.plot}: there is no folder {args.plot.parent}.")
    results = run_ranks(measure, args.world_size, args.size, args.steps, timeout=600)
    plot(results[0], args.plot)


if __name__ == "__main__":
    leave_gloo_as_it_is()
    main(tyro.cli(Args))
