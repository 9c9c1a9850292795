"""Run the planner: python -m hybrid_parallel.planner --help"""

import sys
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro
from rich.console import Console

from comm.cost import Link
from comm.wire import slow_link
from hybrid_parallel.planner.machine import MACHINES, this_machine
from hybrid_parallel.planner.search import best_by_division, choose, plans, sending_less
from hybrid_parallel.planner.shapes import MLPShape, num_parameters, shape_of
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.planner.table import describe, table_of
from hybrid_parallel.sizes import Precision
from lab.launch.errors import WorkbookError

ROWS = 20  # of the table


@dataclass
class Args:
    """Choose by formula how a job's devices are divided, and print the plans, the best one first."""

    model: str = "llama-3-8b"
    """Name of a model (planner/shapes.py, lab/models/model.py)."""
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
    """Link between nodes, as a rate (400gbit) or a rate and the latency of a message (1gbit,1ms). With
    --device this, the link between ranks. None: that of the device's usual network; with --device this,
    messages take no time."""


def main(args: Args) -> None:
    """Print the table of plans and the choice."""
    shape = shape_of(args.model)
    if args.sequence_length is not None:
        if isinstance(shape, MLPShape):
            raise WorkbookError("An mlp has no sequences; leave --sequence-length out.")
        if args.sequence_length < 1:
            raise WorkbookError(f"The number of tokens is {args.sequence_length}; it must be at least 1.")
        shape = replace(shape, block_size=args.sequence_length)
    link = slow_link.parse(args.link) if args.link else None
    if args.device == "this":
        machine = this_machine(args.devices, link or Link(0.0, 0.0))
        where = f"ranks that share {machine.cores} core{'s' * (machine.cores != 1)} of this machine"
    else:
        machine = replace(MACHINES[args.device], outer=link or MACHINES[args.device].outer)
        where = f"devices ({args.device})"
    usual_batch = max(1, min(64 * args.devices, (16 << 20) // shape.block_size))
    batch = usual_batch if args.batch is None else args.batch
    given = {} if args.context is None else {"context": args.context}
    precision: Precision = "float32" if args.device == "this" else "bf16"
    found = plans(shape, machine, args.devices, batch, precision, given)
    best, model = choose(found), TimeModel(shape, machine, batch)
    number, fit = num_parameters(shape), sum(plan.seconds is not None for plan in found)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{args.model}: {f'{number / 1e9:.3g} billion' if number >= 1e9 else f'{number / 1e6:.3g} million'} "
        f"parameters, {batch} examples of {shape.block_size} tokens in a step, {args.devices} {where}.",
        f"{len(found)} plans, of which {fit} fit. Each row is the best plan of one division of the devices:",
        table_of(best_by_division(found)[:ROWS], model),
        f"Choice: {best.sizes}; {describe(best.sizes)}.",
        sep="\n",
    )
    if less := sending_less(shape, machine, batch, best, given):
        print(
            "\nWith less along the data axis (lesson 8), each way in its best plan, compared with the choice:"
        )
        console.print(table_of(less, model))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except WorkbookError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
