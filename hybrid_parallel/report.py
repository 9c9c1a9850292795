"""Show what each axis of a mesh sends, by formula and counted, and how busy its experts are.

      a rank sends in a step   stage 0    stage 1    by formula
      pipeline                 327.8 kB   327.8 kB   an activation and a gradient for each microbatch, ...
      data                     1.7 MB     1.7 MB     all-reduce of the gradients
      tensor                   4.5 MB     4.5 MB     activations and their gradients of each layer, for ...

The numbers are those of traffic.py. Ranks of one stage can differ: then the least and the most are shown.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from comm.exchange import exchange
from expert_parallel.traffic import experts_row
from hybrid_parallel.expert_axis import expert_layers_of
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import AXES, ByAxis, traffic_of_axes
from lab.trace.ledger import Entry, Traffic
from lab.units import show_bytes
from training.run import Run


class AxesReport:
    """Keeps what this rank should send along each axis in the steps of a run, for the rows of its report."""

    def __init__(self, run: Run, hybrid: HybridParallel, is_clipped: bool) -> None:
        self._run, self._hybrid, self._is_clipped = run, hybrid, is_clipped
        self._expected: ByAxis = dict.fromkeys(AXES, Traffic())

    def of_step(self) -> Traffic:
        """Return what this rank should send in a step such as the last one, along all axes."""
        by_axis = traffic_of_axes(self._hybrid, self._is_clipped)
        for axis, traffic in by_axis.items():
            self._expected[axis] += traffic
        return sum(by_axis.values(), Traffic())

    def rows(self) -> dict[str, Any]:
        """Return the sizes, what each rank sent and should have, and the figures of experts.

        The traffic is that along each axis of several ranks. All ranks must call it.
        """
        hybrid, both = self._hybrid, {"sent": counted_by_axis(self._run.traffic), "formula": self._expected}
        rows: dict[str, Any] = {f"axis_{name}": value for name, value in asdict(hybrid.sizes).items()}
        for axis in axes_of(hybrid.sizes):
            for how, by_axis in both.items():
                of_ranks = exchange((by_axis[axis].bytes_sent, by_axis[axis].messages_sent))
                for what, numbers in zip(("bytes", "messages"), zip(*of_ranks, strict=True), strict=True):
                    rows[f"axis_{axis}_{what}_{how}"] = list(numbers)
        sent = {axis: rows[f"axis_{axis}_bytes_sent"][0] for axis in axes_of(hybrid.sizes)}
        experts = {} if hybrid.mesh.experts is None else expert_figures(hybrid)
        shown = {"axes": "rank 0 sent " + ", ".join(f"{a} {show_bytes(n)}" for a, n in sent.items())}
        if "imbalance" in experts:
            shown |= {"experts": experts_row(experts["imbalance"], int(experts["dropped_tokens"]))}
        return rows | experts | {"rows": shown if sent else {}, "meaning": _busiest(sent)}


def _busiest(sent: dict[str, int]) -> str | None:
    if len(sent) < 2 or not (total := sum(sent.values())):
        return None
    most = max(sent, key=lambda axis: sent[axis])
    share = f"{sent[most] / total:.0%} of what rank 0 sent"
    return f"{share} went along the {most} axis: its ranks belong where the links are fastest."


def axes_of(sizes: ParallelSizes) -> list[str]:
    """Return the axes along which several ranks communicate; all replicas average gradients."""
    ranks = asdict(sizes) | {"data": sizes.replicas, "expert": sizes.expert_ranks}
    return [axis for axis in AXES if ranks[axis] > 1]


def counted_by_axis(rows: Mapping[Entry, Traffic]) -> ByAxis:
    """Return the traffic in the rows of a ledger, added up for each axis, without headers."""
    by_axis = dict.fromkeys(AXES, Traffic())
    for entry, sent in rows.items():
        if entry.is_header:
            continue
        by_axis[entry.axis] = by_axis.get(entry.axis, Traffic()) + sent
    return by_axis


def drawn_traffic(hybrid: HybridParallel, expected: ByAxis) -> str:
    """Return a table of what a rank of each stage sends along each axis in a step. All ranks call it."""
    sizes, everyones = hybrid.sizes, exchange([expected[axis].bytes_sent for axis in AXES])
    ranks = sizes.world_size // sizes.pipeline  # of a stage
    lines = [["a rank sends in a step", *(f"stage {p}" for p in range(sizes.pipeline)), "by formula"]]
    for at, axis in enumerate(AXES):
        if axis != "expert" and axis in axes_of(sizes):  # routers decide what goes to experts
            steps = sizes.sync_every if axis == "data" else 1
            sent = [of_rank[at] // steps for of_rank in everyones]
            stages = [sent[first : first + ranks] for first in range(0, sizes.world_size, ranks)]
            shown = [" to ".join(dict.fromkeys(map(show_bytes, (min(s), max(s))))) for s in stages]
            lines.append([axis, *shown, _formula(axis, hybrid)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["   ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join(rows) if len(lines) > 1 else ""


def _formula(axis: str, hybrid: HybridParallel) -> str:
    sizes = hybrid.sizes
    if axis == "data" and sizes.sync_every > 1:
        return f"all-reduce of the parameters, every {sizes.sync_every} steps: the mean of a step"
    if axis == "data" and sizes.compress:
        return f"mean of the gradients, compressed by {sizes.compress}"
    if axis == "data":
        return {
            0: "all-reduce of the gradients",
            1: "reduce-scatter of the gradients, all-gather of the parameters",
            2: "reduce-scatter of the gradients for each microbatch, all-gather of the parameters",
            3: "reduce-scatter of the gradients and 2 all-gathers of the parameters for each microbatch",
        }[sizes.zero]
    if axis == "pipeline":
        has_ties = hybrid.pipeline is not None and hybrid.pipeline.ties
        tied = ", and the gradient of the tied embedding" if has_ties else ""
        return f"an activation and a gradient for each microbatch, over each boundary{tied}"
    if axis == "context":
        how = "round a ring" if sizes.attention == "ring" else "in all-to-alls"
        return f"keys, values and their gradients {how}, for each microbatch and block"
    return "activations and their gradients of each layer, for each microbatch"


def expert_figures(hybrid: HybridParallel) -> dict[str, float]:
    """Return the report's rows on experts, for the last step. All ranks must call it."""
    layers = expert_layers_of(hybrid.stages)
    chosen_bE = [torch.stack(layer.chosen).sum((0, 1)).tolist() for layer in layers]
    dropped = sum(int((torch.stack(layer.chosen) - torch.stack(layer.sent)).sum()) for layer in layers)
    counts = all(hybrid.mesh.coordinate(axis) == 0 for axis in ("data", "context", "tensor"))
    of_stages = [stage for stage in exchange((chosen_bE, dropped) if counts else ()) if stage]
    blocks = [chosen_E for of_stage, _ in of_stages for chosen_E in of_stage]
    forwards = 1 + hybrid.sizes.recompute  # of each microbatch
    return {
        "imbalance": round(max(len(chosen_E) * max(chosen_E) / sum(chosen_E) for chosen_E in blocks), 3),
        "dropped_tokens": sum(dropped for _, dropped in of_stages) // forwards,
    }
