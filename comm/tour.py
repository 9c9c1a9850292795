"""Show each collective in every pattern: what it does, what it sends and how long it takes.

    RUN_MODE=comm docker-compose up --build          make run RUN_MODE=comm WORLD_SIZE=4

For each operation a table shows what the ranks hold before and after it, in a tiny tensor. Then a large
tensor shows the cost of each pattern: bytes and messages counted as they leave, and the measured time beside
the time that is predicted from this link's alpha and beta (comm/cost.py). If each rank has a network
interface of its own, as in a container, the column "on eth0" shows how many bytes left through it. This also
includes torch's own collectives, whose messages we cannot count. On nccl there are only these.

The prediction holds if each rank has a link of its own. Ranks on one machine share its cores and its memory
bus. Their link is measured while all send, so a pattern in which few do is faster than predicted. And LINK,
the rate of each container's network (see docs/running.md), slows down what a container sends, not what it
receives. So many ranks that send to one root are faster than predicted.
"""

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from comm import collectives as c
from comm import cost
from comm.exchange import exchange
from comm.patterns import measure_link
from comm.point_to_point import validate_message
from comm.same_start import check_same_start
from comm.script import start
from comm.shards import shard_sizes
from comm.wire.wire import message_device
from lab import units
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.launch.interface import interface_bytes_sent
from lab.trace.ledger import LEDGER
from lab.trace.stream_clock import time_when_done

Tensors = dict[str, torch.Tensor]
MAX_REPEATS = 1000


@dataclasses.dataclass
class Args:
    """Run every collective in every pattern, and compare bytes and time with their formulas."""

    mb: float = 4.0
    """Size of the large tensor in MiB: all shards together."""
    repeats: int = 5
    """Number of timed runs of each operation, of which the median is shown; a slow operation has fewer."""
    json: bool = False
    """Print all figures as one line of JSON at the end, on stdout; everything else goes to stderr."""


ARGUMENTS = {  # of each operation; if it is not listed, the full tensor
    "barrier": (),
    "scatter": ("shard", "full"),
    "gather": ("shard", "full"),
    "all_gather": ("full", "shard"),
    "reduce_scatter": ("shard", "full"),
    "all_to_all": ("out", "full"),
}


def call(op: str, pattern: str, t: Tensors) -> None:
    """Call one collective. The root is rank 0."""
    getattr(c, op)(*(t[name] for name in ARGUMENTS.get(op, ("full",))), pattern=pattern)


def tensors(cluster: Cluster, numel: int) -> Tensors:
    """Return the tensors of a call. Element i of `full` is 10 * rank + i, so that it shows its origin."""
    device = message_device(None)
    full = torch.arange(numel, dtype=torch.float32, device=device) + 10 * cluster.rank
    mine = shard_sizes(numel, cluster.world_size)[cluster.rank]
    shard = torch.full((mine,), -float(cluster.rank), device=device)
    return {"full": full, "shard": shard, "out": torch.zeros(numel, device=device)}


def patterns_of(op: str) -> tuple[str, ...]:
    """Return the patterns to show: on gloo ours and torch's own, on nccl torch's own."""
    return ("torch",) if dist.get_backend() == "nccl" else (*c.PATTERNS[op], "torch")


def show(cluster: Cluster, op: str, console: Console) -> None:
    """Print what every rank holds before and after the operation, with one element for each rank."""
    t = tensors(cluster, cluster.world_size)
    names = sorted(ARGUMENTS.get(op, ("full",)))
    before = {name: t[name].int().tolist() for name in names}
    call(op, patterns_of(op)[0], t)
    after = {name: t[name].int().tolist() for name in names}
    rows = exchange({"before": before, "after": after})
    if cluster.is_main and names:
        table = Table(title=op, title_justify="left", title_style="bold")
        for column in ("rank", *(f"{name} {when}" for name in names for when in ("before", "after"))):
            table.add_column(column)
        for rank, row in enumerate(rows):
            cells = []
            for name in names:
                old, new = row["before"][name], row["after"][name]
                cells += [str(old), f"[bold green]{new}[/]" if new != old else str(new)]
            table.add_row(str(rank), *cells)
        console.print(table)


def measure(cluster: Cluster, op: str, pattern: str, args: Args, link: cost.Link) -> dict:
    """Return time and traffic of one operation on the large tensor. The time is the slowest rank's."""
    n = cluster.world_size
    numel = int(args.mb * (1 << 18)) // n * n  # torch's own collectives need equal shards
    t = tensors(cluster, numel)
    device = t["full"].device
    call(op, pattern, t)
    times: list[float] = []
    while len(times) < args.repeats and sum(times) < 2.0:
        c.barrier()
        sent, on_wire = LEDGER.total(), own_interface_bytes()
        start = time_when_done(device)
        call(op, pattern, t)
        took = (time_when_done(device) - start) / 1e9
        traffic = LEDGER.total() - sent
        c.barrier()  # waits for the last rank: then all traffic of the operation has left
        if on_wire is not None:
            on_wire = (own_interface_bytes() or 0) - on_wire - cost.header_traffic(n).bytes_sent
        times.append(max(exchange(took)))
    return {
        "op": op,
        "pattern": pattern,
        "bytes": numel * 4,
        "seconds": statistics.median(times),
        "predicted_seconds": None if pattern == "torch" else cost.seconds(op, pattern, numel * 4, n, link),
        "bytes_sent": traffic.bytes_sent,
        "messages_sent": traffic.messages_sent,
        "by_formula": pattern == "torch",
        "interface_bytes": on_wire,
    }


def own_interface_bytes() -> int | None:
    """Return the bytes that this rank's interface has sent; None if ranks share a machine."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    return interface_bytes_sent() if alone else None


def main(cluster: Cluster, args: Args) -> None:
    validate_message(args.mb)
    if not 1 <= args.repeats <= MAX_REPEATS:
        raise WorkbookError(f"--repeats {args.repeats}: choose a number from 1 to {MAX_REPEATS}.")
    check_same_start(torch.empty(0), {"--mb": args.mb, "--repeats": args.repeats})
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 120)
    for op in c.PATTERNS:
        show(cluster, op, console)
    link = measure_link()
    if cluster.is_main:
        rate = f"{units.show_seconds(link.beta)} a byte ({units.show_rate(link.beta)})"
        console.print(f"\nThis link: alpha {units.show_seconds(link.alpha)} a message, beta {rate}.\n")
    size = f"{args.mb:g} MiB ({units.show_bytes(args.mb * (1 << 20))})"
    table = Table("op", "pattern", title=f"{size} on {cluster.world_size} ranks")
    for column in ("rank 0 sent", "messages", "on eth0", "predicted", "measured"):
        table.add_column(column, justify="right")
    rows = []
    for op in c.PATTERNS:
        for pattern in patterns_of(op):
            row = measure(cluster, op, pattern, args, link)
            rows.append(row)
            table.add_row(
                op,
                pattern,
                _shown(units.show_bytes, row["bytes_sent"]) + ("*" if row["by_formula"] else ""),
                str(row["messages_sent"]),
                _shown(units.show_bytes, row["interface_bytes"]),
                _shown(units.show_seconds, row["predicted_seconds"]),
                _shown(units.show_seconds, row["seconds"]),
            )
    num_bytes, chosen = int(args.mb * (1 << 20)), [op for op in c.PATTERNS if len(patterns_of(op)) > 2]
    choices = {op: (c.pattern_for(op, "auto", num_bytes), cost.reason(op, num_bytes)) for op in chosen}
    if cluster.is_main:
        console.print(table)
        console.print("* by formula: the messages of torch's own collectives cannot be counted.")
        for op, (pattern, why) in choices.items():
            console.print(f'pattern="auto" takes {pattern} for {op}: {why}.')
        if dist.get_backend() == "nccl":
            console.print("Our patterns need gloo: BACKEND=gloo shows them beside torch's.")
    if cluster.is_main and args.json:
        figures = {"alpha_seconds": link.alpha, "beta_seconds_per_byte": link.beta, "rows": rows}
        print(json.dumps({"run_mode": "comm", "world_size": cluster.world_size, **figures}), flush=True)


def _shown(show: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else show(value)


if __name__ == "__main__":
    start(main, Args)
