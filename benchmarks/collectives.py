"""Compare our collectives with torch's own on gloo, from 4 bytes to 64 MiB, and through each transport.

    python benchmarks/collectives.py                          on 2 and on 4 ranks; --json for one JSON line
    python benchmarks/collectives.py --quick                  only some operations, and only some sizes
    python benchmarks/collectives.py --plot FILE              time against size on 4 ranks, for each pattern
    python benchmarks/collectives.py --waterfall FILE         the messages of one all-reduce of the ring

The rows `<op> auto` have the pattern and the transport that a program gets, which is shared memory, and the
rows `all_reduce ring` and `all_reduce pipelined_ring` those patterns. `all_reduce_sockets` and
`all_reduce_shm` name the transport. `median` is the median ratio over the rows `<op> auto`. The ring is the
textbook's (comm/algorithms/ring.py), and `pipelined_ring` is the same ring with chunks in segments.

Ours and torch's take turns in one job. Before each run all ranks pass a barrier of the side whose turn it is,
so each finds its own threads and connections as in a program that uses it alone. A run takes as long as its
slowest rank. The ratio is that of the medians: below 1 ours is faster.

In the waterfall a lane is a rank. A bar is a step: it waits for a chunk, and then adds it. An arrow is a
chunk on its way. It starts when the sender posts the chunk, and ends when the receiver has all of it. Of
several runs the picture shows the one with the median time.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from benchmarks import side_by_side
from benchmarks.side_by_side import Rows, Seconds, Step, medians, row, show
from comm import collectives as c
from comm.native import all_gather_single, reduce_scatter_single
from comm.point_to_point import recv, send
from comm.wire.shared_memory import is_possible
from comm.wire.transport import use_transport
from comm.wire.wire import Wire
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.units import KIB, MIB

SIZES = [4, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [KIB, MIB, 16 * MIB]
QUICK_OPS = ["broadcast", "reduce_scatter", "all_reduce", "send_recv"]
NOTES = {"ring": "textbook, used in training", "pipelined_ring": "in segments"}
TRANSPORTS = {"all_reduce_sockets": "sockets", "all_reduce_shm": "shared_memory"}
DRAWN_RANKS = 4
COLOURS = {"wait": "#d9d9d9", "reduce": "#0072b2", "gather": "#e69f00"}  # distinct for the colour-blind, too
DrawnStep = tuple[float, float, float]  # the seconds at which a step starts, has its chunk, and ends


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare our collectives with torch's own."""

    world_size: int | None = None
    """Number of ranks, an even one. None: 2, and then 4."""
    runs: int = 15
    """Timed runs of each operation, after three that do not count. Large tensors get fewer."""
    plot: Path | None = None
    """File for a picture (png or svg) of time against size for every all-reduce."""
    waterfall: Path | None = None
    """File for a picture (png or svg) of the messages of one all-reduce of 4 MiB."""


def calls_of(num_bytes: int) -> dict[str, dict[str, Step]]:
    """Return a function for each side of each operation: "torch", "auto", and each pattern."""
    n, rank = dist.get_world_size(), dist.get_rank()
    shard = torch.ones(max(1, num_bytes // 4 // n))
    full, out = torch.ones(len(shard) * n), torch.empty(len(shard) * n)
    one, parts = full[: max(1, num_bytes // 4)], list(out.split(len(shard))) if rank == 0 else None
    both: dict[str, tuple[Step, Callable[[str], object]]] = {
        "broadcast": (lambda: dist.broadcast(one, 0), lambda p: c.broadcast(one, pattern=p)),
        "scatter": (lambda: dist.scatter(shard, parts), lambda p: c.scatter(shard, full, pattern=p)),
        "gather": (lambda: dist.gather(shard, parts), lambda p: c.gather(shard, out, pattern=p)),
        "reduce": (lambda: dist.reduce(one, 0), lambda p: c.reduce(one, pattern=p)),
        "all_gather": (
            lambda: all_gather_single(out, shard),
            lambda p: c.all_gather(out, shard, pattern=p),
        ),
        "reduce_scatter": (
            lambda: reduce_scatter_single(shard, full),
            lambda p: c.reduce_scatter(shard, full, pattern=p),
        ),
        "all_reduce": (lambda: dist.all_reduce(one), lambda p: c.all_reduce(one, pattern=p)),
        "all_to_all": (
            lambda: dist.all_to_all_single(out, full),
            lambda p: c.all_to_all(out, full, pattern=p),
        ),
        "barrier": (dist.barrier, lambda p: c.barrier(pattern=p)),
        "send_recv": (
            lambda: _there_and_back(dist.send, dist.recv, one),
            lambda _: _there_and_back(send, recv, one),
        ),
    }

    def sides(op: str) -> dict[str, Step]:
        torchs, ours = both[op]
        patterns = ["auto", *c.PATTERNS.get(op, [])]
        return {"torch": torchs} | {pattern: lambda by=pattern: ours(by) for pattern in patterns}

    return {op: sides(op) for op in both}


def _there_and_back(send: Callable, recv: Callable, ball: torch.Tensor) -> None:
    """Send the tensor to the other rank of a pair, and receive it from there. An odd rank starts."""
    partner = dist.get_rank() ^ 1
    for action in (send, recv) if dist.get_rank() % 2 else (recv, send):
        action(ball, partner)


def measure(cluster: Cluster, args: Args) -> dict[tuple[str, int], Seconds]:
    """Return the seconds of every run on this rank, by row and size, then by side."""
    seconds: dict[tuple[str, int], Seconds] = {}
    for size in QUICK_SIZES if args.quick else SIZES:
        runs = max(5, min(args.runs, 200 * MIB // size))
        calls = calls_of(size)
        if args.plot:
            seconds["all_reduce", size] = alternate(calls["all_reduce"], runs)
            continue
        for op in QUICK_OPS if args.quick else calls:
            rings = ["ring", "pipelined_ring"] if op == "all_reduce" else []
            if op != "barrier" or size == SIZES[0]:
                seconds[op, size] = alternate({by: calls[op][by] for by in ["torch", "auto", *rings]}, runs)
        for name, transport in TRANSPORTS.items():
            if transport == "shared_memory" and not is_possible():
                continue
            use_transport(transport)
            seconds[name, size] = alternate({by: calls["all_reduce"][by] for by in ("torch", "auto")}, runs)
            use_transport(None)
    return seconds


def alternate(calls: dict[str, Step], runs: int) -> Seconds:
    """Return the seconds of each side. The sides take turns, in another order each time."""
    seconds: Seconds = {name: [] for name in calls}
    for run in range(3 + runs):
        for name in random.Random(run).sample(list(calls), len(calls)):  # the same order on each rank
            dist.barrier() if name == "torch" else c.barrier()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[3:] for name, times in seconds.items()}


def rows_of(ranks: int, args: Args) -> Rows:
    """Return a row for each operation, size and pattern of ours, against torch's."""
    by_rank = run_ranks(measure, ranks, args, timeout=900)
    rows = []
    for op, size in by_rank[0]:
        median = medians([rank[op, size] for rank in by_rank])
        theirs = median.pop("torch")
        for pattern, ours in median.items():
            what = op if op in TRANSPORTS else f"{op} {pattern}"
            rows.append(row(what, "torch", ours, theirs, ranks, num_bytes=size))
    return rows


def plot(rows: Rows, path: Path) -> None:
    """Draw seconds against bytes: latency counts at the left, bandwidth at the right."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for pattern in c.PATTERNS["all_reduce"]:
        ours = [one for one in rows if one["what"] == f"all_reduce {pattern}"]
        label = f"{pattern} ({NOTES[pattern]})" if pattern in NOTES else pattern
        sizes = [one["bytes"] for one in ours]
        axes.plot(sizes, [one["ours"] for one in ours], marker="o", label=label)
    axes.plot(sizes, [one["theirs"] for one in ours], "k--", marker="s", label="torch (gloo)")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds (median)")
    axes.set_title(f"all-reduce on {rows[0]['world_size']} ranks, loopback")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def drawn_steps(cluster: Cluster, runs: int) -> list[list[DrawnStep]]:
    """Return the steps of this rank in each run. The clock is the machine's, and the same for all ranks."""
    tensor, found = torch.ones(MIB), []

    def shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        posted.append(time.perf_counter())
        arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size)
        leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size)
        arriving.wait()
        arrived.append(time.perf_counter())
        leaving.wait()

    with replaced("comm.algorithms.ring.shift", shift):
        for _ in range(3 + runs):
            posted, arrived = [], []
            c.barrier()
            c.all_reduce(tensor, op="mean", pattern="ring")
            found.append(list(zip(posted, arrived, [*posted[1:], time.perf_counter()], strict=True)))
    return found[3:]


def draw_waterfall(by_rank: list[list[list[DrawnStep]]], path: Path) -> None:
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
            axes.annotate("", to, from_, arrowprops={"arrowstyle": "->", "color": "#444444", "lw": 0.8})
    labels = {
        "wait": "waits for a chunk",
        "reduce": "adds it, waits until its own has left",
        "gather": "has a finished sum, waits until its own has left",
    }
    for kind, label in labels.items():
        axes.barh(0, 0, color=COLOURS[kind], label=label)
    axes.set(xlabel="milliseconds", yticks=range(n), yticklabels=[f"rank {rank}" for rank in range(n)])
    axes.set_title(f"one all-reduce of 4 MiB: ring, {n} ranks")
    axes.invert_yaxis()
    axes.legend(loc="upper left", ncols=3, fontsize=8, bbox_to_anchor=(0, -0.16), frameon=False)
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    if args.world_size is not None and (args.world_size < 2 or args.world_size % 2):
        raise SystemExit(f"--world-size {args.world_size}: ranks send in pairs, so their number is even.")
    if args.waterfall is not None:
        draw_waterfall(run_ranks(drawn_steps, args.world_size or DRAWN_RANKS, args.runs), args.waterfall)
        return
    if args.plot is not None:
        plot(rows_of(args.world_size or DRAWN_RANKS, args), args.plot)
        return
    rows = [one for n in ([args.world_size] if args.world_size else [2, 4]) for one in rows_of(n, args)]
    show("collectives", rows, args, "ours against torch.distributed on gloo, loopback")
    for ranks in sorted({one["world_size"] for one in rows}) if not args.json else ():
        autos = [one for one in rows if one["world_size"] == ranks and one["what"].endswith(" auto")]
        ratios = [one["ratio"] for one in autos]
        print(f"{ranks} ranks, auto: median {statistics.median(ratios):.2f}, at most {max(ratios):.2f}")


if __name__ == "__main__":
    side_by_side.start(__file__)
