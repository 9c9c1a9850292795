"""Show plans in a table, and a division of the ranks in a few words."""

from rich import box
from rich.table import Table

from hybrid_parallel.planner.search import DIVISION, Plan
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.units import show_bytes, show_seconds

ALWAYS = ("pipeline", "data", "tensor")  # columns of every table; the others are there if a plan uses them


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
            ", ".join(_options(sizes, "recompute")),
            show_bytes(plan.memory_bytes),
            show_seconds(plan.step_seconds) if known else "",
            f"{used:.1%}" if known else "",
            plan.reason,
        )
    return table


def describe(sizes: ParallelSizes) -> str:
    """Return in a few words how the ranks of a division work."""
    words = [f"{sizes.microbatches} microbatch{'es' * (sizes.microbatches > 1)}"]
    if sizes.pipeline > 1:
        words.append(f"schedule {_schedule(sizes)}")
    words += [f"ZeRO {sizes.zero}"] * bool(sizes.zero)
    words += [f"experts on {sizes.expert_ranks} ranks"] * (sizes.expert_ranks > 1)
    return ", ".join([*words, *_options(sizes, "recomputation")])


def _options(sizes: ParallelSizes, recompute: str) -> list[str]:
    """Return what the ranks of the axes do, and `recompute` if a plan does that."""
    words = [f"{sizes.attention.replace('_', '-')} attention"] * (sizes.context > 1)
    words += [f"compress {sizes.compress}"] * bool(sizes.compress)
    words += [f"sync every {sizes.sync_every}"] * (sizes.sync_every > 1)
    return words + ["sequence parallel"] * sizes.sequence_parallel + [recompute] * sizes.recompute


def _schedule(sizes: ParallelSizes) -> str:
    return f"{sizes.schedule} x {sizes.chunks}" if sizes.schedule == "interleaved" else sizes.schedule
