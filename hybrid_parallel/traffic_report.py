"""Show what each axis of a mesh sends: by formula before the first step, counted beside it after the last.

      a rank sends in a step   stage 0    stage 1    by formula
      pipeline                 327.8 kB   327.8 kB   4 x 65.5 kB over each boundary of the stage, ...
      data                     1.7 MB     1.7 MB     all-reduce of the gradients
      tensor                   4.5 MB     4.5 MB     4 x (4 all-reduces of 65.5 kB in each block; ...)

The numbers are those of traffic.py. Ranks of one stage can differ: then the least and the most are shown.
"""

from collections.abc import Mapping

from comm.exchange import exchange
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import AXES, ByAxis, expected_of_tensor, itemsize_of
from lab.models.model import MLP
from lab.trace.ledger import Entry, Traffic
from lab.units import show_bytes


def counted_by_axis(rows: Mapping[Entry, Traffic]) -> ByAxis:
    """Return the traffic in the rows of a ledger, added up for each axis."""
    by_axis = dict.fromkeys(AXES, Traffic())
    for entry, sent in rows.items():
        by_axis[entry.axis] = by_axis.get(entry.axis, Traffic()) + sent
    return by_axis


def figures(counted: ByAxis, expected: ByAxis, sizes: ParallelSizes) -> dict[str, list[int]]:
    """Return the report's rows for each axis of several ranks: a number for each rank. All ranks call it."""
    everyones = exchange([[_numbers(by_axis[axis]) for axis in AXES] for by_axis in (counted, expected)])
    rows = {}
    for at, axis in enumerate(AXES):
        for unit, what in enumerate(("bytes", "messages")):
            for kind, how in enumerate(("sent", "formula")):
                if sizes.ranks_along(axis) > 1:
                    rows[f"axis_{axis}_{what}_{how}"] = [of_rank[kind][at][unit] for of_rank in everyones]
    return rows


def drawn_traffic(hybrid: HybridParallel, expected: ByAxis) -> str:
    """Return a table of what a rank of each stage sends along each axis in a step. All ranks call it."""
    sizes, everyones = hybrid.sizes, exchange([expected[axis].bytes_sent for axis in AXES])
    ranks = sizes.world_size // sizes.pipeline  # of a stage
    lines = [["a rank sends in a step", *(f"stage {p}" for p in range(sizes.pipeline)), "by formula"]]
    for at, axis in enumerate(AXES):
        if axis != "expert" and sizes.ranks_along(axis) > 1:  # routers decide what goes to experts
            sent = [of_rank[at] for of_rank in everyones]
            of_stages = [_range(sent[p * ranks : (p + 1) * ranks]) for p in range(sizes.pipeline)]
            lines.append([axis, *of_stages, _formula(hybrid, axis)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["   ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*rows, _collectives(hybrid)]) if len(lines) > 1 else ""


def _formula(hybrid: HybridParallel, axis: str) -> str:
    """Return in words what traffic.py computes, with the numbers of this run."""
    sizes, times = hybrid.sizes, f"{hybrid.sizes.microbatches} x "
    if axis == "pipeline":
        [size, *_] = [like.nbytes for like in hybrid.pipeline.boundaries.values() if like.is_floating_point()]
        tied = ", and the gradient of the tied embedding" if hybrid.pipeline.ties else ""
        return f"{times}{show_bytes(size)} over each boundary of the stage{tied}"
    if axis == "data":
        reduced = f"{times if sizes.zero > 1 else ''}reduce-scatter of the gradients"
        return {
            0: "all-reduce of the gradients",
            3: f"{reduced}, {times}2 all-gathers of the parameters",
        }.get(sizes.zero, f"{reduced}, all-gather of the parameters")
    if axis == "context":
        return f"{times}{_of_attention(hybrid)} in each block"
    if isinstance(hybrid.plain, MLP):
        return f"{times}all-reduce of the outputs of row layers, and of the input gradients of column layers"
    batch, time = hybrid.example_shape
    size = batch * time * hybrid.plain.config.width * expected_of_tensor(hybrid).computed_itemsize
    if hybrid.experts is not None:
        return (
            f"{times}(2 all-reduces of {show_bytes(size)} in each block; embedding, head, loss), and experts"
        )
    in_block = "6 all-gathers and 4 reduce-scatters" if sizes.sequence_parallel else "4 all-reduces"
    again = ", and the forward's again" if sizes.recompute else ""
    return f"{times}({in_block} of {show_bytes(size)} in each block{again}; embedding, head, loss)"


def _of_attention(hybrid: HybridParallel) -> str:
    """Return in words what a rank sends along the context axis for a block."""
    sizes, config, (batch, time) = hybrid.sizes, hybrid.plain.config, hybrid.example_shape
    of_head = batch * time * config.width // config.num_heads * itemsize_of(hybrid)
    kv, q = (show_bytes(heads // sizes.tensor * of_head) for heads in (2 * config.kv_heads, config.num_heads))
    again = " and the forward's again" if sizes.recompute else ""
    if sizes.attention == "ring":
        passes = 3 + sizes.recompute
        return f"{passes * (sizes.context - 1)} messages of keys and values ({kv}) or of their gradients"
    return f"4 all-to-alls of queries ({q}), keys and values ({kv}), outputs, and gradients{again}"


def _collectives(hybrid: HybridParallel) -> str:
    """Return what a rank sends in a collective of the run's pattern."""
    if hybrid.pattern == "auto":
        return "Each collective takes the pattern that was measured to be the fastest for its size (auto)."
    if hybrid.pattern == "tree":
        return "In a tree a rank sends a tensor to its parent, and the result to each of its children."
    ring = "In a ring of n ranks a rank sends 2 (n-1)/n of what it all-reduces, and (n-1)/n of what it"
    return f"{ring} gathers or reduce-scatters."


def _range(numbers: list[int]) -> str:
    least, most = show_bytes(min(numbers)), show_bytes(max(numbers))
    return least if least == most else f"{least} to {most}"


def _numbers(traffic: Traffic) -> list[int]:
    return [traffic.bytes_sent, traffic.messages_sent]
