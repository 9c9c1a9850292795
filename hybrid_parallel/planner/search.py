"""Choose how a job's ranks are divided: predict every division by formula, and take the fastest that fits.

      python -m hybrid_parallel.planner --model llama-3-405b --devices 16384 --device h100

A plan is a ParallelSizes (sizes.py). For each one that is possible for the model and the batch,

      memory_model.py   predicts what the fullest rank holds at its peak, which must fit into a device
      time_model.py     predicts how long a step takes, if the plan fits
      plan.py           says why it is slower than the best plan, or does not fit

`plans` returns all plans, the best one first, for `sharding_strategy: auto` and for the command line. It
tries them all, because the formulas are fast: 16384 devices have some 17 000 plans. Only a long sequence is
not cut into pieces so short that the formulas would promise too much (LEAST_TOKENS).
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from rich.console import Console

from comm.transport import slow_link
from hybrid_parallel.planner.machine import Machine, machine_of
from hybrid_parallel.planner.memory_model import predict_memory
from hybrid_parallel.planner.plan import Plan, as_dict, best_by_division, describe, reason_of, table_of
from hybrid_parallel.planner.shapes import AnyShape, shape_of
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes, Precision, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.units import show_bytes

USABLE = 0.95  # of a device's memory; the rest is for the runtime and for gaps between tensors
LEAST_TOKENS = 2048  # that a rank has of a long sequence: with fewer its kernels do not reach their rates


def plans(
    shape: AnyShape,
    machine: Machine,
    devices: int,
    batch: int,
    precision: Precision = "bf16",
    given: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """Return all plans, the best one first, and those that do not fit at the end, the smallest one first.

    `batch` is the number of examples in a step, over all devices together. `given` are fields of
    ParallelSizes that must stay as they are. Raise WorkbookError if no plan is possible.
    """
    given = given or {}
    _refuse(devices, batch, given)
    model, usable = TimeModel(shape, machine, batch), USABLE * machine.device.memory_bytes
    found = []
    for sizes in candidates(shape, machine, devices, batch, {"precision": precision} | dict(given)):
        memory = predict_memory(shape, sizes, batch, machine.autocast)
        found.append(Plan(sizes, memory, model.predict(sizes) if memory.total <= usable else None))
    if not found:
        raise WorkbookError(
            f"No division of {devices} devices makes sense for this model of {shape.num_layers} layers and "
            f"{shape.kv_heads} key and value heads with {batch} examples in a step"
            + (f" and {', '.join(f'{name} {value}' for name, value in given.items())}" if given else "")
            + "; take another number of devices or examples."
        )
    # Of equally fast plans the one with larger microbatches comes first, because small kernels are slower
    # than the formulas say, and then the one with less memory.
    found.sort(key=lambda p: (p.compared_seconds, _num_kernels(p), p.memory_bytes))
    return [dataclasses.replace(plan, reason=reason_of(plan, found[0], usable)) for plan in found]


def _num_kernels(plan: Plan) -> int:
    """Return the number of microbatches, with which that of kernels grows; 0 if the plan does not fit.

    So plans that do not fit are in order of their memory alone.
    """
    return 0 if plan.seconds is None else plan.sizes.microbatches


def choose(found: list[Plan], memory_bytes: float) -> Plan:
    """Return the best plan. WorkbookError if none fits into `memory_bytes` of a device."""
    best = found[0]
    if best.seconds is None:
        raise WorkbookError(
            f"No plan fits: the smallest one needs {show_bytes(best.memory_bytes)} per device, and "
            f"{show_bytes(USABLE * memory_bytes)} of {show_bytes(memory_bytes)} can be used; take more "
            "devices, devices with more memory, or fewer examples in a step."
        )
    return best


def candidates(
    shape: AnyShape, machine: Machine, devices: int, batch: int, given: Mapping[str, Any]
) -> Iterator[ParallelSizes]:
    """Yield every division of `devices` that makes sense and agrees with `given`, in every way to run it."""
    for pipeline in _kept(given, "pipeline", _divisors(devices, shape.num_layers)):
        for tensor in _kept(given, "tensor", _divisors(devices // pipeline, machine.devices_per_node)):
            replicas = devices // (pipeline * tensor)
            for context in _kept(given, "context", _divisors(replicas, _most_context(shape))):
                for data in _kept(given, "data", [replicas // context] if replicas % context == 0 else []):
                    axes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
                    for microbatches in _kept(given, "microbatches", _divisors(batch // data, batch)):
                        division = ParallelSizes(**dict(given) | axes | {"microbatches": microbatches})
                        for sizes in _ways(shape, division, given):
                            with contextlib.suppress(WorkbookError):
                                refuse_sizes(sizes, shape, batch, devices, shape.experts)
                                yield sizes


def _most_context(shape: AnyShape) -> int:
    """Return the largest number of ranks that cut a sequence, if none is given.

    Models with short sequences are here to learn with, so theirs may be cut among up to 8 ranks.
    """
    length = shape.sequence_length
    return length // LEAST_TOKENS if length >= 2 * LEAST_TOKENS else min(length, 8)


def _ways(shape: AnyShape, division: ParallelSizes, given: Mapping[str, Any]) -> Iterator[ParallelSizes]:
    """Yield every way to run a division: schedule, ZeRO, attention, experts, recomputation and so on."""
    pipeline, schedules = division.pipeline, [(division.schedule, division.chunks)]
    if pipeline > 1:
        most = shape.num_layers // pipeline
        names = _kept(given, "schedule", ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"])
        chunks = _kept(given, "chunks", sorted({c for c in (2, 4, most) if 2 <= c <= most}))
        schedules = [(n, c) for n in names for c in (chunks if n == "interleaved" else [division.chunks])]
    options: dict[str, list[Any]] = {
        "zero": [0] if division.replicas == 1 else [0, 1] if pipeline > 1 else [0, 1, 2, 3],
        "attention": [division.attention] if division.context == 1 else ["ring", "all_to_all"],
        "expert_ranks": _divisors(math.gcd(shape.experts, division.replicas), shape.experts),
        "sequence_parallel": [False, True] if division.tensor > 1 else [False],
        "recompute": [False, True],
    }
    kept = [_kept(given, name, otherwise) for name, otherwise in options.items()]
    for (schedule, number), values in product(schedules, product(*kept)):
        changes = dict(zip(options, values, strict=True))
        yield dataclasses.replace(division, schedule=schedule, chunks=number, **changes)


def _kept(given: Mapping[str, Any], name: str, otherwise: list[Any]) -> list[Any]:
    return [given[name]] if name in given else otherwise


def _divisors(number: int, most: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [n for n in sorted({*small, *(number // n for n in small)}) if n <= most]


def _refuse(devices: int, batch: int, given: Mapping[str, Any]) -> None:
    for what, number in (("devices", devices), ("examples in a step", batch)):
        if number < 1:
            raise WorkbookError(f"The number of {what} is {number}; it must be at least 1.")
    fields = [field.name for field in dataclasses.fields(ParallelSizes)]
    for name in given:
        if name not in fields:
            raise WorkbookError(f"A plan has no {name}; it has {', '.join(fields)}.")


@dataclass
class Args:
    """Choose by formula how a job's devices are divided, and print the plans, the best one first."""

    model: str = "llama-3-8b"
    """Name of a model (shapes.py, model.py), a .yaml file of its sizes, or a Hugging Face config.json."""
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
    link: str | None = None
    """Link between nodes, as a rate (400gbit) or a rate and the latency of a message (1gbit,1ms). With
    --device this, the link between ranks. None: that of the device's usual network; with --device this,
    messages take no time."""
    precision: Precision | None = None
    """Type of the numbers in which the model computes. None: bf16; with --device this, float32."""
    rows: int = 20
    """Number of rows of the table. Each shows the best plan of one division of the devices."""
    json: bool = False
    """Print the plans of the table as one line of JSON."""


def main(args: Args) -> None:
    """Print the table of plans and the choice."""
    for name in ("devices", "rows"):
        if getattr(args, name) < 1:
            raise WorkbookError(f"The number of {name} is {getattr(args, name)}; it must be at least 1.")
    changes = {} if args.sequence_length is None else {"sequence_length": args.sequence_length}
    shape = shape_of(args.model, **changes)
    link = slow_link.parse(args.link) if args.link else None
    machine = machine_of(args.device, args.devices, link)
    precision = args.precision or ("float32" if args.device == "this" else "bf16")
    batch = args.batch
    if batch is None:
        batch = max(1, min(64 * args.devices, (16 << 20) // shape.sequence_length))
    given = {} if args.context is None else {"context": args.context}
    found = plans(shape, machine, args.devices, batch, precision, given)
    best = choose(found, machine.device.memory_bytes)
    rows = best_by_division(found)[: args.rows]
    if args.json:
        print(json.dumps({"model": args.model, "batch": batch, "plans": [as_dict(plan) for plan in rows]}))
        return
    fit = sum(plan.seconds is not None for plan in found)
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(
        f"{args.model}: {_number(shape.num_parameters)} parameters, {batch} examples of "
        f"{shape.sequence_length} tokens in a step, {args.devices} {_devices(args.device, machine)}.",
        f"{len(found)} plans, of which {fit} fit. Each row is the best plan of one division of the devices:",
        table_of(rows, TimeModel(shape, machine, batch)),
        f"Choice: {best.sizes}; {describe(best.sizes)}.",
        sep="\n",
    )


def _number(count: int) -> str:
    return f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"


def _devices(device: str, machine: Machine) -> str:
    """Return what the ranks run on."""
    if machine.cores is None:
        return f"devices ({device})"
    return f"ranks that share {machine.cores} core{'s' * (machine.cores > 1)} of this machine"
