"""Print plans in a table, the best one first: python -m hybrid_parallel.planner --help"""

import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from comm.cost import Link
from comm.wire import slow_link
from hybrid_parallel.planner.machine import MACHINES, this_machine
from hybrid_parallel.planner.search import DIVISION, Plan, best_by_division, plans
from hybrid_parallel.planner.shapes import num_parameters, shape_of
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.units import show_bytes, show_seconds

ROWS = 20  # of the table
ALWAYS = ("pipeline", "data", "tensor")  # columns of every table; the others are there if a plan uses them


@dataclass
class Args:
    """Choose by formula how a job's devices are divided, and print the plans, the best one first."""

    model: str = "llama-3-8b"
    """Name of a GPT (planner/shapes.py, lab/models/model.py)."""
    devices: int = 8
    """Number of devices. Each of them is one rank."""
    device: Literal["a100-40gb", "a100-80gb", "h100", "h200", "this"] = "h100"
    """Kind of the devices. "this" is the machine that this command runs on; its speed is measured."""
    batch: int | None = None
    """Number of examples in a step, over all devices together. None: 64 for each device, but at most as many
    as make 16 Mi tokens."""
    sequence_length: int | None = None
    """Number of tokens of an example. None: as many as the model's description says."""
    context: int | None = None
    """Number of ranks along the context axis, which cut each sequence. None: the planner chooses."""
    link: Annotated[str | None, tyro.conf.arg(metavar="RATE[,DELAY]")] = None
    """Link between nodes, as a rate (400gbit) or a rate and the latency of a message (1gbit,1ms); with
    --device this, between ranks. None: the device's usual network; with --device this, one without delay."""


def main(args: Args) -> None:
    """Print the table of plans and the choice."""
    shape, link = shape_of(args.model), slow_link.parse(args.link) if args.link else None
    if args.sequence_length is not None:
        shape = replace(shape, block_size=args.sequence_length)
    if args.device == "this":
        machine = this_machine(max(1, args.devices), link or Link(0.0, 0.0))
    else:
        machine = replace(MACHINES[args.device], outer=link or MACHINES[args.device].outer)
    usual_batch = max(1, min(64 * args.devices, (16 << 20) // max(1, shape.block_size)))
    batch = usual_batch if args.batch is None else args.batch
    given: dict[str, Any] = {"precision": "float32"} if args.device == "this" else {}
    if args.context is not None:
        given["context"] = args.context
    found = plans(shape, machine, args.devices, batch, **given)
    best, fit = found[0], sum(plan.seconds is not None for plan in found)
    Console(width=None if sys.stdout.isatty() else 160).print(
        f"{args.model}: {num_parameters(shape) / 1e6:,.1f} million parameters, {batch} examples of "
        f"{shape.block_size} tokens in a step, {args.devices} devices ({args.device}).",
        f"{len(found)} plans, of which {fit} fit. Each row is the best plan of one division of the devices:",
        table_of(best_by_division(found)[:ROWS], TimeModel(shape, machine, batch)),
        f"Choice: {best.sizes}; {describe(best.sizes)}.",
        sep="\n",
    )


def table_of(rows: list[Plan], model: TimeModel) -> Table:
    """Return the plans as a table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    names = [name for name in DIVISION if name in ALWAYS or any(getattr(p.sizes, name) > 1 for p in rows)]
    for name in [*names, "microbatches"]:
        table.add_column("experts" if name == "expert_ranks" else name, justify="right")
    for head in ("schedule", "ZeRO", "also"):
        table.add_column(head)
    for head in ("memory", "step", "MFU"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why")
    for plan in rows:
        sizes, known = plan.sizes, plan.seconds is not None
        used = model.utilisation(sizes, plan.step_seconds, causal=model.shape.fused_attention)
        table.add_row(
            *(str(getattr(sizes, name)) for name in [*names, "microbatches"]),
            _schedule(sizes) if sizes.pipeline > 1 else "",
            str(sizes.zero or ""),
            ", ".join(_options(sizes)),
            show_bytes(plan.memory.total),
            show_seconds(plan.step_seconds) if known else "",
            f"{used:.1%}" if known else "",
            plan.reason,
        )
    return table


def describe(sizes: ParallelSizes) -> str:
    """Return in a few words how the ranks of a division work."""
    words = [f"{sizes.microbatches} microbatch{'es' * (sizes.microbatches > 1)}"]
    words += [f"schedule {_schedule(sizes)}"] * (sizes.pipeline > 1)
    words += [f"ZeRO {sizes.zero}"] * bool(sizes.zero)
    words += [f"experts on {sizes.expert_ranks} ranks"] * (sizes.expert_ranks > 1)
    return ", ".join([*words, *_options(sizes)])


def _options(sizes: ParallelSizes) -> list[str]:
    words = [f"{sizes.attention.replace('_', '-')} attention"] * (sizes.context > 1)
    return words + ["sequence parallel"] * sizes.sequence_parallel + ["recompute"] * sizes.recompute


def _schedule(sizes: ParallelSizes) -> str:
    return f"{sizes.schedule} x {sizes.chunks}" if sizes.schedule == "interleaved" else sizes.schedule
