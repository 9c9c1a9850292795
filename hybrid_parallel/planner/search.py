"""Choose how a job's ranks are divided: predict every division by formula, and take the fastest that fits.

      python -m hybrid_parallel.planner --model llama-3-405b --devices 16384 --device h100

`plans` tries all ParallelSizes (sizes.py): the formulas are fast, and 16384 devices have some 17 000 plans.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import Memory, predict_memory
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.planner.step_time import Seconds, TimeModel
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.units import show_bytes, show_seconds

USABLE = 0.95  # of a device's memory; the rest is for the runtime and for gaps between tensors
LEAST_TOKENS = 2048  # that a rank has of a long sequence: with fewer its kernels do not reach their rates
DIVISION = ("pipeline", "data", "context", "tensor", "expert_ranks")


@dataclass(frozen=True)
class Plan:
    """Holds a division, its memory and seconds (None if it does not fit), and why it is the best or not."""

    sizes: ParallelSizes
    memory: Memory
    seconds: Seconds | None
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step with four digits, because more mean nothing; infinity without any."""
        return math.inf if self.seconds is None else float(f"{self.seconds.total:.4g}")


def plans(shape: ModelShape, machine: Machine, devices: int, batch: int, **given: Any) -> list[Plan]:
    """Return all plans, the best one first, those that do not fit last. Raise WorkbookError if none fits.

    `batch` counts the examples of a step. `given` are fields of ParallelSizes that must stay as they are; the
    precision is bf16 unless it is given.
    """
    model, usable = TimeModel(shape, machine, batch), USABLE * machine.memory_bytes
    found = []
    for sizes in candidates(shape, machine, devices, batch, {"precision": "bf16"} | given):
        memory = predict_memory(shape, sizes, batch, machine.autocast)
        found.append(Plan(sizes, memory, model.predict(sizes) if memory.total <= usable else None))
    if not found:
        asked = ", ".join([f"{batch} examples in a step", *(f"{name} {given[name]}" for name in given)])
        raise WorkbookError(
            f"No division of {devices} devices makes sense for this model of {shape.num_layers} layers and "
            f"{shape.block_size} tokens with {asked}; take another number of devices, examples or tokens."
        )
    # Of equally fast plans the one with larger microbatches comes first, because small kernels are slower
    # than the formulas say, and then the one with less memory. Plans that do not fit are in order of memory.
    found.sort(key=lambda p: (p.step_seconds, p.sizes.microbatches * (p.seconds is not None), p.memory.total))
    if found[0].seconds is None:
        raise WorkbookError(
            f"No plan fits: the smallest one {reason_of(found[0], found[0], usable)}. Take more devices, "
            "devices with more memory, or fewer examples in a step."
        )
    return [replace(plan, reason=reason_of(plan, found[0], usable)) for plan in found]


def reason_of(plan: Plan, best: Plan, usable: float) -> str:
    """Return why a plan is not the best: what takes the most memory, or which of its Seconds have grown."""
    if plan.seconds is None or best.seconds is None:
        name, most = max(vars(plan.memory).items(), key=lambda item: item[1])
        return (
            f"needs {show_bytes(plan.memory.total)}, and a device has {show_bytes(usable)}; "
            f"{show_bytes(most)} are for {name.replace('_', ' ')}"
        )
    if plan is best:
        return "the fastest that fits"
    slower = plan.step_seconds / best.step_seconds - 1
    if slower == 0:
        return "as fast, with smaller microbatches or no less memory"
    before = vars(best.seconds)
    more, part = max((seconds - before[part], part) for part, seconds in vars(plan.seconds).items())
    return f"{slower:.1%} slower: {part} +{show_seconds(more)}"


def best_by_division(found: list[Plan]) -> list[Plan]:
    """Return the first plan of each division of the ranks and of the experts, in their order."""
    first: dict[tuple[int, ...], Plan] = {}
    for plan in found:
        first.setdefault(tuple(getattr(plan.sizes, name) for name in DIVISION), plan)
    return list(first.values())


def candidates(
    shape: ModelShape, machine: Machine, devices: int, batch: int, given: Mapping[str, Any]
) -> Iterator[ParallelSizes]:
    """Yield every division of `devices` that makes sense and agrees with `given`, in every way to run it."""
    length, layers = shape.block_size, shape.num_layers
    most_context = length // LEAST_TOKENS if length >= 2 * LEAST_TOKENS else min(length, 8)
    most = {"pipeline": layers, "tensor": machine.devices_per_node, "context": most_context}
    for axes in _combinations({axis: _divisors(devices, number) for axis, number in most.items()}, given):
        ranks = math.prod(axes.values())
        if ranks < 1 or devices % ranks:
            continue
        pipeline, data = axes["pipeline"], given.get("data", devices // ranks)
        replicas = data * axes["context"]
        chunks = sorted({c for c in (2, 4, layers // pipeline) if 2 <= c <= layers // pipeline})
        ways: dict[str, list[Any]] = {
            "microbatches": _divisors(batch // data, batch),
            "schedule": ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"] if pipeline > 1 else ["1f1b"],
            "chunks": chunks if pipeline > 1 and chunks else [2],
            "zero": [0] if replicas == 1 else [0, 1] if pipeline > 1 else [0, 1, 2, 3],
            "attention": ["ring", "all_to_all"] if axes["context"] > 1 else ["ring"],
            "expert_ranks": _divisors(math.gcd(shape.experts, replicas), shape.experts),
            "sequence_parallel": [False, True] if axes["tensor"] > 1 else [False],
            "recompute": [False, True],
        }
        for way in _combinations(ways, given):
            if way["schedule"] == "interleaved" or way["chunks"] == given.get("chunks", 2):
                sizes = ParallelSizes(**dict(given) | axes | {"data": data} | way)
                with suppress(WorkbookError):
                    refuse_sizes(sizes, shape, batch, devices, shape.experts)
                    yield sizes


def _combinations(options: dict[str, list[Any]], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value for each option; what is given has one value."""
    values = [[given[name]] if name in given else options[name] for name in options]
    return (dict(zip(options, chosen, strict=True)) for chosen in product(*values))


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
