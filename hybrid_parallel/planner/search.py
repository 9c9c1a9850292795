"""Choose how a job's ranks are divided: predict every division by formula, and take the fastest that fits.

      python -m hybrid_parallel.planner --model llama-3-405b --devices 16384 --device h100

      memory.py      predicts what the fullest rank holds at its peak, which must fit into a device
      step_time.py   predicts how long a step takes, if the plan fits
      reason_of      says why it is slower than the best plan, or does not fit

`plans` tries all ParallelSizes (sizes.py): the formulas are fast, and 16384 devices have some 17 000 plans.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import Memory, predict_memory
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.planner.step_time import Seconds, TimeModel
from hybrid_parallel.sizes import ParallelSizes, Precision, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.units import show_bytes, show_seconds

USABLE = 0.95  # of a device's memory; the rest is for the runtime and for gaps between tensors
LEAST_TOKENS = 2048  # that a rank has of a long sequence: with fewer its kernels do not reach their rates
DIVISION = ("pipeline", "data", "context", "tensor", "expert_ranks")
LESS: tuple[dict[str, Any], ...] = (  # ways to send less along the data axis
    *({"compress": name} for name in ("bf16", "int8", "topk", "powersgd")),
    *({"sync_every": steps} for steps in (8, 32)),
)
CAUSES = {
    "compute": "for computing",
    "tensor": "for collectives of the tensor axis",
    "context": "for messages of the context axis",
    "experts": "for sending tokens to experts",
    "bubble": "idle in the pipeline",
    "messages": "for messages between stages",
    "data": "for collectives of the data axis",
    "optimizer": "for the optimizer",
}


@dataclass(frozen=True)
class Plan:
    """Holds a division, its memory and seconds (None if it does not fit), and why it is the best or not."""

    sizes: ParallelSizes
    memory: Memory
    seconds: Seconds | None
    reason: str = ""

    @property
    def memory_bytes(self) -> float:
        """Return the bytes that the fullest rank holds at its peak."""
        return self.memory.total

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step; infinity for a plan that does not fit."""
        return float("inf") if self.seconds is None else self.seconds.total

    @property
    def compared_seconds(self) -> float:
        """Return the seconds of a step as plans are compared: with four digits, because more mean nothing."""
        return float(f"{self.step_seconds:.4g}")


def plans(
    shape: AnyShape,
    machine: Machine,
    devices: int,
    batch: int,
    precision: Precision = "bf16",
    given: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """Return all plans, the best one first, those that do not fit last. Raise WorkbookError if there is none.

    `batch` counts the examples of a step. `given` are fields of ParallelSizes that must stay as they are.
    """
    given = given or {}
    for what, number in (("devices", devices), ("examples in a step", batch)):
        if number < 1:
            raise WorkbookError(f"The number of {what} is {number}; it must be at least 1.")
    model, usable = TimeModel(shape, machine, batch), USABLE * machine.memory_bytes
    found = []
    for sizes in candidates(shape, machine, devices, batch, {"precision": precision} | dict(given)):
        memory = predict_memory(shape, sizes, batch, machine.autocast)
        found.append(Plan(sizes, memory, model.predict(sizes) if memory.total <= usable else None))
    if not found:
        raise WorkbookError(
            f"No division of {devices} devices makes sense for this model of {shape.num_layers} layers with "
            f"{batch} examples in a step"
            + (f" and {', '.join(f'{name} {value}' for name, value in given.items())}" if given else "")
            + "; take another number of devices or examples."
        )
    # Of equally fast plans the one with larger microbatches comes first, because small kernels are slower
    # than the formulas say, and then the one with less memory. Plans that do not fit are in order of memory.
    found.sort(
        key=lambda p: (p.compared_seconds, p.sizes.microbatches * (p.seconds is not None), p.memory_bytes)
    )
    return [replace(plan, reason=reason_of(plan, found[0], usable)) for plan in found]


def sending_less(
    shape: AnyShape, machine: Machine, batch: int, best: Plan, given: Mapping[str, Any] | None = None
) -> list[Plan]:
    """Return the best plan of each way to send less along the data axis, compared with the best of all plans.

    The ways that no plan has are left out.
    """
    found = []
    for way in LESS:
        fixed = {"zero": 0} | dict(given or {}) | way
        with contextlib.suppress(WorkbookError):
            plan = plans(shape, machine, best.sizes.world_size, batch, best.sizes.precision, fixed)[0]
            if plan.seconds is not None:
                change = plan.compared_seconds / best.compared_seconds - 1
                length = f"{abs(change):.1%} {'shorter' if change < 0 else 'longer'}"
                plan = replace(plan, reason=f"a step is {length}, and learns less")
            found.append(plan)
    return sorted(found, key=lambda plan: (plan.step_seconds, plan.memory_bytes))


def choose(found: list[Plan]) -> Plan:
    """Return the best plan. WorkbookError if none fits."""
    if found[0].seconds is None:
        raise WorkbookError(
            f"No plan fits: the smallest one {found[0].reason}. Take more devices, devices with more memory, "
            "or fewer examples in a step."
        )
    return found[0]


def reason_of(plan: Plan, best: Plan, usable: float) -> str:
    """Return why a plan is not the best: what takes too much memory, or why it is slower than the best."""
    if plan.seconds is None:
        name, most = max(vars(plan.memory).items(), key=lambda item: item[1])
        parts = {"temporary": "logits and other temporary tensors", "optimizer_state": "optimizer state"}
        return (
            f"needs {show_bytes(plan.memory_bytes)}, and a device has {show_bytes(usable)}; "
            f"{show_bytes(most)} are for {parts.get(name, name)}"
        )
    if plan is best:
        return "the fastest that fits"
    assert best.seconds is not None
    slower = plan.compared_seconds / best.compared_seconds - 1
    if slower == 0:
        return "as fast, with smaller microbatches or no less memory"
    more = {name: getattr(plan.seconds, name) - getattr(best.seconds, name) for name in CAUSES}
    cause = max(more, key=lambda name: more[name])
    return f"{slower:.1%} slower: {show_seconds(more[cause])} more {CAUSES[cause]}"


def best_by_division(found: list[Plan]) -> list[Plan]:
    """Return the first plan of each division of the ranks and of the experts, in their order."""
    first: dict[tuple[int, ...], Plan] = {}
    for plan in found:
        first.setdefault(tuple(getattr(plan.sizes, name) for name in DIVISION), plan)
    return list(first.values())


def candidates(
    shape: AnyShape, machine: Machine, devices: int, batch: int, given: Mapping[str, Any]
) -> Iterator[ParallelSizes]:
    """Yield every division of `devices` that makes sense and agrees with `given`, in every way to run it."""
    length, layers = shape.block_size, shape.num_layers
    most_context = length // LEAST_TOKENS if length >= 2 * LEAST_TOKENS else min(length, 8)
    most = {"pipeline": layers, "tensor": machine.devices_per_node, "context": most_context}
    for axes in _combinations({axis: _divisors(devices, most[axis]) for axis in most}, given):
        if devices % math.prod(axes.values()):
            continue
        pipeline, data = axes["pipeline"], given.get("data", devices // math.prod(axes.values()))
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
                with contextlib.suppress(WorkbookError):
                    refuse_sizes(sizes, shape, batch, devices, shape.experts)
                    yield sizes


def _combinations(options: dict[str, list[Any]], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value for each option; what is given has one value."""
    values = [[given[name]] if name in given else options[name] for name in options]
    return (dict(zip(options, chosen, strict=True)) for chosen in product(*values))


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
