"""Compare our collectives, with pattern="auto", with torch's own on gloo, from 4 bytes to 64 MiB.

    python benchmarks/transports.py                   on 2 and on 4 ranks; --json for one JSON line
    python benchmarks/transports.py --quick           only some operations, and only some sizes
    python benchmarks/transports.py --fixed           also each pattern, and how well auto chooses among them

The rows `<op> auto` use the transport that a program gets, shared memory. `all_reduce_sockets` and
`all_reduce_shm` name the transport. `median` is the median ratio over the rows `<op> auto`.

Ours and torch's take turns in one job. Before each run all ranks pass a barrier of the side whose turn it is,
so each finds its own threads and connections as in a program that uses it alone. A run takes as long as its
slowest rank. The ratio is that of the medians: below 1 ours is faster.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import tyro

from benchmarks.collectives import operations
from benchmarks.side_by_side import KIB, MIB, leave_gloo_as_it_is, medians, row, show
from comm import collectives as c
from comm.point_to_point import recv, send
from comm.transport.choice import use_transport
from comm.transport.segment import is_possible
from lab.cluster import Cluster
from lab.ranks import run_ranks

SIZES = [4, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [KIB, MIB, 16 * MIB]
QUICK_OPS = ["broadcast", "reduce_scatter", "all_reduce", "send_recv"]
Calls = dict[str, Callable[[], object]]
Seconds = dict[tuple[str, int], dict[str, list[float]]]


@dataclasses.dataclass
class Args:
    """Compare our collectives with torch's own."""

    world_size: int | None = None
    """Number of ranks: 2, 4 or 8. None: 2, and then 4."""
    runs: int = 15
    """Timed runs of each operation, after three that do not count. Large tensors get fewer."""
    quick: bool = False
    """Measure only some operations, and only some sizes."""
    fixed: bool = False
    """Measure each pattern, too, and not only auto."""
    json: bool = False
    """Print one JSON line instead of a table."""


def calls_of(num_bytes: int) -> dict[str, Calls]:
    """Return a function for each side of each operation: "torch", "auto", and each pattern."""
    n, rank = dist.get_world_size(), dist.get_rank()
    shard = torch.ones(max(1, num_bytes // 4 // n))
    full, out = torch.ones(len(shard) * n), torch.empty(len(shard) * n)
    parts, one = list(out.split(len(shard))), full[: max(1, num_bytes // 4)]
    torchs: Calls = {
        "broadcast": lambda: dist.broadcast(one, 0),
        "scatter": lambda: dist.scatter(shard, parts if rank == 0 else None, 0),
        "gather": lambda: dist.gather(shard, parts if rank == 0 else None, 0),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather_single(out, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, full),
        "all_reduce": lambda: dist.all_reduce(one),
        "all_to_all": lambda: dist.all_to_all_single(out, full),
        "barrier": lambda: dist.barrier(),
        "send_recv": lambda: _there_and_back(dist.send, dist.recv, one),
    }
    ours = operations(one, full, shard, out, "sum")
    ours["barrier"] = lambda pattern: c.barrier(pattern=pattern)

    def with_pattern(op: str, pattern: str) -> Callable[[], object]:
        return lambda: ours[op](pattern)

    result: dict[str, Calls] = {"send_recv": {"auto": lambda: _there_and_back(send, recv, one)}}
    for op in ours:
        result[op] = {pattern: with_pattern(op, pattern) for pattern in ("auto", *c.PATTERNS[op])}
    return {op: {"torch": torchs[op]} | result[op] for op in torchs}


def _there_and_back(send: Callable, recv: Callable, ball: torch.Tensor) -> None:
    """Send the tensor to the other rank of a pair, and receive it from there. An odd rank starts."""
    partner = dist.get_rank() ^ 1
    for action in (send, recv) if dist.get_rank() % 2 else (recv, send):
        action(ball, partner)


def measure(cluster: Cluster, args: Args) -> Seconds:
    """Return the seconds of every run on this rank, by row and size, then by side."""
    seconds: Seconds = {}
    for size in QUICK_SIZES if args.quick else SIZES:
        for op, calls in calls_of(size).items():
            if (args.quick and op not in QUICK_OPS) or (op == "barrier" and size != SIZES[0]):
                continue
            torch_call = {"torch": calls.pop("torch")}
            seconds[op, size] = alternate(torch_call | {"auto": calls["auto"]}, size, args)
            if args.fixed and len(calls) > 2:
                seconds[f"{op} fixed", size] = alternate(calls, size, args)
        all_reduce = calls_of(size)["all_reduce"]
        for name in ("sockets", "shared_memory"):
            if name == "shared_memory" and not is_possible():
                continue
            use_transport(name)
            label = f"all_reduce_{'shm' if name == 'shared_memory' else name}"
            seconds[label, size] = alternate({one: all_reduce[one] for one in ("torch", "auto")}, size, args)
            use_transport(None)
    return seconds


def alternate(calls: Calls, size: int, args: Args) -> dict[str, list[float]]:
    """Return the seconds of each side. The sides take turns, in another order each time."""
    names, runs = list(calls), max(5, min(args.runs, 200 * MIB // size))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(3 + runs):
        for name in random.Random(run).sample(names, len(names)):  # the same order on each rank
            dist.barrier() if name == "torch" else c.barrier()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[3:] for name, times in seconds.items()}


def rows(world_size: int, by_rank: list[Seconds]) -> list[dict]:
    """Return a row for each operation and size against torch, and for each fixed pattern against auto."""
    table = []
    for what, size in by_rank[0]:
        median = medians([rank[what, size] for rank in by_rank])
        op, _, is_fixed = what.partition(" ")
        against = "auto" if is_fixed else "torch"
        theirs = median.pop(against)
        for pattern, ours in median.items():
            name = op if op.startswith("all_reduce_") else f"{op} {pattern}"
            one = row(name, against, "loopback", ours, theirs, world_size=world_size, num_bytes=size)
            table.append(one)
    return table


def against_the_best(table: list[dict]) -> list[float]:
    """Return the time of auto over that of the best fixed pattern, for each operation and size.

    The best of several noisy medians is on average less than the median of the best pattern.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    for one in table:
        if one["against"] == "auto":
            ratios.setdefault((one["what"].partition(" ")[0], one["bytes"]), []).append(one["ratio"])
    return [1 / min(of_patterns) for of_patterns in ratios.values()]


def summary(ratios: list[float]) -> str:
    """Return the median of the ratios, and how many of them are over 1.10."""
    over = sum(ratio > 1.1 for ratio in ratios)
    return f"median {statistics.median(ratios):.2f}; {over} of {len(ratios)} over 1.10"


def main(args: Args) -> None:
    if args.world_size is not None and args.world_size not in (2, 4, 8):
        raise SystemExit(f"--world-size {args.world_size}: choose 2, 4 or 8.")
    result: list[dict] = []
    for ranks in [args.world_size] if args.world_size else [2, 4]:
        table = rows(ranks, run_ranks(measure, ranks, args, timeout=900))
        if not args.json:
            title = f"ours against torch.distributed on gloo, {ranks} ranks, loopback"
            show("transports", table, False, title)
            ratios = [one["ratio"] for one in table if one["what"].endswith(" auto")]
            over = sum(ratio > 1 for ratio in ratios)
            print(f"median {statistics.median(ratios):.2f}; {over} of {len(ratios)} rows over 1.00\n")
            if args.fixed:
                print(f"auto / the best fixed pattern: {summary(against_the_best(table))}\n")
        result += table
    if args.json:
        show("transports", result, True, "")


if __name__ == "__main__":
    leave_gloo_as_it_is()
    main(tyro.cli(Args))
