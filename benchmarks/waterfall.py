"""Draw a waterfall of one all-reduce of the textbook's ring, from the real times of its messages.

    python benchmarks/waterfall.py --plot comm/waterfall.png
    python benchmarks/waterfall.py --transport gloo --mb 16 --plot /tmp/gloo.png

A lane is a rank. A bar is a step: it waits for a chunk, and then adds it. An arrow is a chunk on its way. It
starts when the sender posts the chunk, and ends when the receiver has all of it. Of several runs the picture
shows the one with the median time.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import torch
import tyro
from matplotlib.figure import Figure

from benchmarks.side_by_side import MIB, leave_gloo_as_it_is
from comm import collectives
from comm.transport.choice import use_transport
from comm.wire.wire import Wire
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.replace import replaced

COLOURS = {"wait": "#d9d9d9", "reduce": "#0072b2", "gather": "#e69f00"}  # distinct for the colour-blind, too
Step = tuple[float, float, float]  # the seconds at which a step starts, has its chunk, and ends


@dataclasses.dataclass
class Args:
    """Draw the messages of one all-reduce of the textbook's ring."""

    plot: Path
    """File for the picture (png or svg)."""
    world_size: int = 4
    """Number of ranks, from 2 to 8."""
    mb: float = 4.0
    """Size of the tensor in MiB."""
    transport: Literal["auto", "shared_memory", "sockets", "gloo"] = "auto"
    """How the messages travel."""
    runs: int = 15
    """Number of all-reduces, after three that do not count."""


def measure(cluster: Cluster, args: Args) -> list[list[Step]]:
    """Return the steps of this rank in each run. The clock is the machine's, and the same for all ranks."""
    use_transport(args.transport)
    tensor = torch.ones(int(args.mb * MIB) // 4)
    runs: list[list[Step]] = []

    def shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        now = time.perf_counter()
        if runs[-1]:
            runs[-1][-1] = (*runs[-1][-1][:2], now)
        arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size)
        leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size)
        arriving.wait()
        runs[-1].append((now, time.perf_counter(), 0.0))
        leaving.wait()

    with replaced("comm.algorithms.ring.shift", shift):
        for _ in range(3 + args.runs):
            collectives.barrier()
            runs.append([])
            collectives.all_reduce(tensor, op="mean", pattern="ring")
            runs[-1][-1] = (*runs[-1][-1][:2], time.perf_counter())
    return runs[3:]


def plot(by_rank: list[list[list[Step]]], args: Args) -> None:
    """Draw the run with the median time."""
    runs = sorted(zip(*by_rank, strict=True), key=lambda ranks: ranks[0][-1][2] - ranks[0][0][0])
    ranks = runs[len(runs) // 2]
    zero, n = min(steps[0][0] for steps in ranks), len(ranks)
    figure = Figure(figsize=(9, 1.2 + 0.75 * n), layout="constrained")
    axes = figure.subplots()
    for rank, steps in enumerate(ranks):
        for number, (start, arrived, end) in enumerate(steps):
            phase = "reduce" if number < n - 1 else "gather"
            for kind, left, right in (("wait", start, arrived), (phase, arrived, end)):
                axes.barh(rank, (right - left) * 1e3, 0.4, (left - zero) * 1e3, color=COLOURS[kind])
        for (sent, _, _), (_, arrived, _) in zip(ranks[(rank - 1) % n], steps, strict=True):
            from_, to = ((sent - zero) * 1e3, (rank - 1) % n), ((arrived - zero) * 1e3, rank)
            line = {"arrowstyle": "->", "color": "#444444", "lw": 0.8}
            axes.annotate("", to, from_, arrowprops=line)
    labels = {
        "wait": "waits for a chunk",
        "reduce": "adds it, waits until its own has left",
        "gather": "has a finished sum, waits until its own has left",
    }
    for kind, label in labels.items():
        axes.barh(0, 0, color=COLOURS[kind], label=label)
    axes.set(xlabel="milliseconds", yticks=range(n), yticklabels=[f"rank {rank}" for rank in range(n)])
    axes.set_title(f"one all-reduce of {args.mb:g} MiB: ring, {n} ranks, transport {args.transport}")
    axes.invert_yaxis()
    axes.legend(loc="upper left", ncols=3, fontsize=8, bbox_to_anchor=(0, -0.16), frameon=False)
    figure.savefig(args.plot, dpi=110)


def main(args: Args) -> None:
    if not 2 <= args.world_size <= 8 or args.mb * MIB < 4 * args.world_size:
        raise SystemExit("Choose 2 to 8 ranks, and a tensor with an element for each.")
    if args.runs < 1:
        raise SystemExit(f"--runs {args.runs}: choose at least one run.")
    if not args.plot.parent.is_dir():
        raise SystemExit(f"--plot {args.plot}: there is no folder {args.plot.parent}.")
    plot(run_ranks(measure, args.world_size, args, timeout=300), args)


if __name__ == "__main__":
    leave_gloo_as_it_is()
    main(tyro.cli(Args))
