"""Show each collective: what it does, what it sends and how long it takes.

    RUN_MODE=comm docker-compose up --build          make run RUN_MODE=comm WORLD_SIZE=4

For each operation a table shows what the ranks hold before and after it, in a tiny tensor. Then a large
tensor shows its cost: bytes and messages counted as they leave, and the measured time beside the time that
is predicted from the link's alpha and beta (comm/cost.py). An operation has one row, for the pattern that
`pattern="auto"` takes by these formulas; --all measures every pattern, and torch's own collectives, whose
messages we cannot count. On nccl there are only these.

The prediction holds if each rank has a link of its own. Ranks on one machine share its cores and its memory
bus, so there the link is simulated, unless --link says otherwise. LINK, the rate of each container's
network (docs/running.md), slows down what a container sends, not what it receives: many ranks that send to
one root are then faster than predicted. If each rank has a network interface of its own, as in a container,
the column "on eth0" shows how many bytes left through it.
"""

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
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
from comm.wire import slow_link
from comm.wire.groups import message_device
from lab import units
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.launch.interface import interface_bytes_sent
from lab.trace.ledger import LEDGER
from lab.trace.stream_clock import time_when_done

Tensors = dict[str, torch.Tensor]
MAX_REPEATS = 1000
SIMULATED = "200mbit,1ms"


@dataclasses.dataclass
class Args:
    """Run every collective, and compare bytes and time with their formulas."""

    mb: float = 1.0
    """Size of the large tensor in MiB: all shards together."""
    repeats: int = 5
    """Number of timed runs of each operation, of which the median is shown; a slow operation has fewer."""
    all: bool = False
    """Measure every pattern of every operation, and torch's own, not only the one that "auto" takes."""
    link: Annotated[str | None, tyro.conf.arg(metavar="RATE[,DELAY]")] = None
    """Speed of the link that is simulated: a rate, or a rate and the delay of a message; none: the link as it
    is. By default 200mbit,1ms if all ranks run on this machine, else none."""
    json: bool = False
    """Print the figures of --all as one line of JSON at the end, on stdout; the rest goes to stderr."""


ARGUMENTS = {  # of each operation; if it is not listed, the full tensor
    "barrier": (),
    "scatter": ("shard", "full"),
    "gather": ("shard", "full"),
    "all_gather": ("full", "shard"),
    "reduce_scatter": ("shard", "full"),
    "all_to_all": ("out", "full"),
}


MEANINGS = {
    "broadcast": "all ranks get the tensor of rank 0",
    "scatter": "rank 0 gives each rank one part",
    "gather": "rank 0 gets the shard of each rank",
    "reduce": "rank 0 gets the sum of all tensors",
    "all_gather": "all ranks get the shard of each rank",
    "reduce_scatter": "each rank gets its part of the sum",
    "all_reduce": "all ranks get the sum",
    "all_to_all": "each rank gives each other rank one part",
    "barrier": "no rank goes on before all are there",
}


def call(op: str, pattern: str, t: Tensors) -> None:
    """Call one collective. The root is rank 0."""
    getattr(c, op)(*(t[name] for name in ARGUMENTS.get(op, ("full",))), pattern=pattern)


def tensors(cluster: Cluster, numel: int) -> Tensors:
    """Return the tensors of a call, whose numbers show where they come from.

    Element i of `full` is 10 * rank + i, and the elements of `shard` are 100 + rank.
    """
    device = message_device(None)
    full = torch.arange(numel, dtype=torch.float32, device=device) + 10 * cluster.rank
    mine = shard_sizes(numel, cluster.world_size)[cluster.rank]
    shard = torch.full((mine,), 100.0 + cluster.rank, device=device)
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
        console.print(f"[bold]{op}: {MEANINGS[op]}[/]")
        table = Table()
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


def link_to_simulate(cluster: Cluster, link: str | None) -> slow_link.Link | None:
    """Return the link that --link names, or None for the real one. Raise WorkbookError for another text."""
    if link is None:
        is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == cluster.world_size
        link = SIMULATED if is_one_machine and dist.get_backend() != "nccl" else "none"
    return None if link == "none" else slow_link.parse(link)


def main(cluster: Cluster, args: Args) -> None:
    validate_message(args.mb)
    if not 1 <= args.repeats <= MAX_REPEATS:
        raise WorkbookError(f"--repeats {args.repeats}: choose a number from 1 to {MAX_REPEATS}.")
    measures_all = args.all or args.json
    options = {"--mb": args.mb, "--repeats": args.repeats, "--all": measures_all, "--link": args.link}
    check_same_start(torch.empty(0), options)
    simulated = link_to_simulate(cluster, args.link)
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 120)
    if cluster.is_main:
        console.print(
            "In these tables full is a whole tensor, shard a rank's part, and out what an all-to-all returns."
        )
    for op in c.PATTERNS:
        show(cluster, op, console)
    slow_link.use(simulated)
    link = measure_link() if simulated is None else simulated
    n, num_bytes = cluster.world_size, int(args.mb * (1 << 20))
    rows = []
    for op in c.PATTERNS:
        patterns = patterns_of(op)
        if not measures_all and len(patterns) > 1:
            patterns = (c.pattern_for(op, "auto", num_bytes),)
        rows += [measure(cluster, op, pattern, args, link) for pattern in patterns]
    if not cluster.is_main:
        return
    kind = "This link is simulated (ARGS='--link none' takes the real one)"
    kind = kind if simulated is not None else "This link is as it is here"
    rate = f"{units.show_seconds(link.beta)} a byte ({units.show_rate(link.beta)})"
    alpha = units.show_seconds(link.alpha)
    console.print(f"\n{kind}: alpha {alpha} a message, beta {rate}.\n", soft_wrap=True)
    title = f"{args.mb:g} MiB ({units.show_bytes(num_bytes)}) on {n} ranks"
    if not measures_all:
        title += ', each in the pattern that "auto" takes'
    console.print(table_of(rows, title))
    if any(row["by_formula"] for row in rows):
        console.print("* by formula: the messages of torch's own collectives cannot be counted.")
    for sentence in conclusion(cluster, rows, args):
        console.print(sentence, soft_wrap=True)
    if args.json:
        figures = {"alpha_seconds": link.alpha, "beta_seconds_per_byte": link.beta, "rows": rows}
        print(json.dumps({"run_mode": "comm", "world_size": n, **figures}), flush=True)


def table_of(rows: list[dict], title: str) -> Table:
    """Return the table of what each operation costs."""
    has_interface = any(row["interface_bytes"] is not None for row in rows)
    interface = ["on eth0"] if has_interface else []
    table = Table("op", "pattern", title=title)
    for column in ("rank 0 sent", "messages", *interface, "predicted", "measured"):
        table.add_column(column, justify="right")
    for row in rows:
        sent = units.show_bytes(row["bytes_sent"]) + "*" * row["by_formula"]
        cells = [row["op"], row["pattern"], sent, str(row["messages_sent"])]
        cells += [_shown(units.show_bytes, row["interface_bytes"])] if has_interface else []
        times = (_shown(units.show_seconds, row[name]) for name in ("predicted_seconds", "seconds"))
        table.add_row(*cells, *times)
    return table


def conclusion(cluster: Cluster, rows: list[dict], args: Args) -> list[str]:
    """Return what the table means, and what to run next."""
    said, header = [], cost.header_traffic(cluster.world_size)
    if header.messages_sent and dist.get_backend() != "nccl":
        sent = f"{header.messages_sent} messages of {units.show_bytes(header.bytes_sent)} together"
        said.append(
            f"Ranks check by a header that all call the same operation: {sent}, only in the times here."
        )
    times = {
        f"{row['op']} ({row['pattern']})": row["seconds"] / row["predicted_seconds"]
        for row in rows
        if row["predicted_seconds"]
    }
    if times:
        middle = statistics.median(abs(ratio - 1) for ratio in times.values())
        farthest = max(times, key=lambda name: abs(times[name] - 1))
        said.append(
            f"Half of the measured times are within {middle:.0%} of the predicted ones. Farthest off is "
            f"{farthest}, with {times[farthest]:.2f} times its prediction, which counts no computing."
        )
    if dist.get_backend() == "nccl":
        return [*said, "Our patterns need gloo: BACKEND=gloo shows them beside torch's."]
    if args.all:
        return [*said, "make run RUN_MODE=point_to_point measures this machine's own link."]
    ranks = f"WORLD_SIZE={cluster.world_size}"
    what = "shows the other patterns (see comm/README.md), and PyTorch's own."
    return [*said, f"make run RUN_MODE=comm {ranks} ARGS=--all {what}"]


def _shown(show: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else show(value)


if __name__ == "__main__":
    start(main, Args)
