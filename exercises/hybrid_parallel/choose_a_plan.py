"""Choosing a plan. Write `plans` and `choose` of hybrid_parallel/planner/search.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/planner/search.py yet: it
contains the solution.

You may use:

    AnyShape = ModelShape | MLPShape
    candidates(shape, machine, devices, batch, given) -> Iterator[ParallelSizes]
        Yield every division of `devices` that makes sense and agrees with `given`, in every way to
        run it.
    Machine(device: Device, devices_per_node: int, inner: Link, outer: Link, cores: int | None = None,
            handling: Handling = Handling(), hides_reductions: bool = False, autocast: bool = False,
            gathers_keys: bool = False)
        Holds a device, the number of them in a node, and the links of each device within and between
        nodes.
    memory.total: float
        Return the sum of all parts.
    Plan(sizes: ParallelSizes, memory: Memory, seconds: Seconds | None, reason: str = '')
        Holds a division of the ranks, its predicted memory and seconds, and why it is the best or is
        not.
    plan.compared_seconds: float
        Return the seconds of a step as plans are compared: with four digits, because more mean
        nothing.
    plan.memory_bytes: float
        Return the bytes that the fullest rank holds at its peak.
    Precision = Literal['float32', 'bf16']
    predict_memory(shape: AnyShape, sizes: ParallelSizes, batch: int, autocast: bool = False) -> Memory
        Return what the fullest rank of a plan holds at its peak, with `batch` examples in a step.
    reason_of(plan: Plan, best: Plan, usable: float) -> str
        Return why a plan is not the best: what takes too much memory, or why it is slower than the
        best.
    shape.kv_heads: int
        Return the number of key and value heads: by default one for each query head.
    show_bytes(num_bytes: float) -> str
        Return the size in a suitable unit, a power of 1000: "774.9 kB" or "3.3 MB".
    time_model.predict(sizes: ParallelSizes) -> Seconds
        Return the predicted seconds of a step of a plan.
    TimeModel(shape: AnyShape, machine: Machine, batch: int)
        Predicts the steps of one model on one machine; `batch` counts the examples of a step, over
        all ranks.
    USABLE = 0.95
    WorkbookError
        Tell the user what is wrong and how to fix it.
    machine.autocast: bool, machine.device.memory_bytes: float, machine.device: Device, shape.num_layers:
    int

Check it with `python -m exercises check choose_a_plan`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import predict_memory
from hybrid_parallel.planner.search import USABLE, Plan, candidates, reason_of
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.sizes import Precision
from lab.launch.errors import WorkbookError
from lab.units import show_bytes


def plans(
    shape: AnyShape,
    machine: Machine,
    devices: int,
    batch: int,
    precision: Precision = "bf16",
    given: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """Return all plans: the best one first, and at the end those that do not fit, the smallest first.

    `batch` is the number of examples in a step, over all devices together. `given` are fields of
    ParallelSizes that must stay as they are. `candidates` needs them as one dictionary together with
    the precision; a precision in `given` counts more than the argument. Raise WorkbookError with "The
    number of {what} is {number}" if there are less than one `devices` or `examples in a step`. A plan
    is a Plan(sizes, memory, seconds). It fits if the fullest rank needs at most USABLE times
    machine.device.memory_bytes; else its seconds are None. Raise WorkbookError ("No division of
    {devices} devices makes sense ...") if there is no plan at all.

    `compared_seconds` of a plan are those of its step, or infinity if it does not fit. Of equally
    fast plans the one with fewer microbatches comes first, and then the one with less memory. Only
    memory decides the order of plans that do not fit. In the end each plan gets the reason that
    `reason_of` finds for it.
    """
    raise NotImplementedError("`plans` is not written yet.")


def choose(found: list[Plan], memory_bytes: float) -> Plan:
    """Return the best plan. WorkbookError if none fits into `memory_bytes` of a device.

    `found` is what `plans` returns for a device with `memory_bytes`: a plan fits if it has
    seconds. The message has the form "No plan fits: the smallest one needs {} per device, ...",
    with a size by show_bytes.
    """
    raise NotImplementedError("`choose` is not written yet.")
