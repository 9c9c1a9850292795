"""Hold a plan: a division of the ranks, with its predicted memory and time. Show plans in a table."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from hybrid_parallel.planner.memory_model import Memory
from hybrid_parallel.planner.seconds import Seconds
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.units import show_bytes, show_seconds

DIVISION = ("pipeline", "data", "context", "tensor", "expert_ranks")
AXES = ("pipeline", "data", "tensor")  # columns of every table; the others are there if a plan uses them
HEADS = {"expert_ranks": "experts"}
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
    """Holds a division of the ranks, its predicted memory and seconds, and why it is the best or is not.

    A plan that does not fit into the memory of a device has None as `seconds`.
    """

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


def reason_of(plan: Plan, best: Plan, usable: float) -> str:
    """Return why a plan is not the best: what takes too much memory, or why it is slower than the best."""
    if plan.seconds is None:
        name, most = max(vars(plan.memory).items(), key=lambda item: item[1])
        parts = {"temporary": "logits and buffers", "optimizer_state": "optimizer state"}
        return (
            f"needs {show_bytes(plan.memory_bytes)}, and there are {show_bytes(usable)}; "
            f"{show_bytes(most)} are for {parts.get(name, name)}"
        )
    if plan is best:
        return "the fastest that fits"
    assert best.seconds is not None
    slower = plan.compared_seconds / best.compared_seconds - 1
    more = {name: getattr(plan.seconds, name) - getattr(best.seconds, name) for name in CAUSES}
    cause = max(more, key=lambda name: more[name])
    if slower == 0:  # then the plan comes after the best one for one of these reasons (planner.py)
        if plan.sizes.microbatches > best.sizes.microbatches:
            return "as fast, with smaller microbatches"
        more_bytes = plan.memory_bytes - best.memory_bytes
        return f"as fast, with {show_bytes(more_bytes) if more_bytes else 'no'} more memory"
    return f"{slower:.{1 if slower >= 5e-4 else 2}%} slower: {show_seconds(more[cause])} more {CAUSES[cause]}"


def best_by_division(found: list[Plan]) -> list[Plan]:
    """Return the first plan of each division of the ranks and of the experts, in their order."""
    first: dict[tuple[int, ...], Plan] = {}
    for plan in found:
        first.setdefault(tuple(getattr(plan.sizes, name) for name in DIVISION), plan)
    return list(first.values())


def describe(sizes: ParallelSizes) -> str:
    """Return in a few words how the ranks of a division work."""
    words = [f"{sizes.microbatches} microbatch{'es' * (sizes.microbatches > 1)}"]
    if sizes.pipeline > 1:
        words.append(f"schedule {_schedule(sizes)}")
    words += [f"ZeRO {sizes.zero}"] * bool(sizes.zero)
    words += [f"experts on {sizes.expert_ranks} ranks"] * (sizes.expert_ranks > 1)
    return ", ".join([*words, *_options(sizes, "recomputation")])


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as one flat dictionary for JSON. `step_seconds` is None if the plan does not fit."""
    seconds = None if plan.seconds is None else plan.step_seconds
    numbers = {"memory_bytes": round(plan.memory_bytes), "step_seconds": seconds}
    return dataclasses.asdict(plan.sizes) | numbers | {"reason": plan.reason}


def table_of(rows: list[Plan], model: TimeModel) -> Table:
    """Return the plans as a table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    names = [name for name in DIVISION if name in AXES or any(getattr(p.sizes, name) > 1 for p in rows)]
    for name in [*names, "microbatches"]:
        table.add_column(HEADS.get(name, name), justify="right")
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
            ", ".join(_options(sizes, "recompute")),
            show_bytes(plan.memory_bytes),
            show_seconds(plan.step_seconds) if known else "",
            f"{used:.1%}" if known else "",
            plan.reason,
        )
    return table


def _options(sizes: ParallelSizes, recompute: str) -> list[str]:
    """Return what the ranks of the context and tensor axes do, and `recompute` if a plan does that."""
    attention = {"ring": "ring", "all_to_all": "all-to-all"}[sizes.attention]
    words = [f"{attention} attention"] * (sizes.context > 1)
    return words + ["sequence parallel"] * sizes.sequence_parallel + [recompute] * sizes.recompute


def _schedule(sizes: ParallelSizes) -> str:
    return f"{sizes.schedule} x {sizes.chunks}" if sizes.schedule == "interleaved" else sizes.schedule
