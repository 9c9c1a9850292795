"""Cut a model into stages by what its parts cost: the slowest stage sets the pace of a pipeline.

costs   4 1 1 2 2 2        a part costs its number of layers, or of parameters
cut     4|1 1 2|2 2        the most expensive stage is as cheap as can be

Counted in layers, what comes before and after a GPT's blocks costs nothing: it goes with the first and the
last block.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Literal

from torch import nn

from lab.launch.errors import WorkbookError
from lab.models.parts import Part, as_sequential, parts_of
from pipeline_parallel.stage import Stage

Balance = Literal["layers", "parameters"]


def balanced_stages(
    model: nn.Module | Sequence[nn.Module], stages: int, balance: Balance = "layers"
) -> list[Stage]:
    """Return the model cut into that many stages, of about equally many layers or parameters."""
    model = as_sequential(model)
    parts = parts_of(model)
    ranges = cut(costs_of(model, parts, balance), stages)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


def costs_of(model: nn.Module, parts: list[Part], balance: Balance) -> list[float]:
    """Return the cost of each part. For an nn.Sequential "layers" means parameters, too."""
    if balance == "layers" and not isinstance(model, nn.Sequential):
        return [float(part.layers) for part in parts]
    modules = ([model.get_submodule(path) for path in part.modules] for part in parts)
    return [float(sum(p.numel() for p in nn.ModuleList(each).parameters())) for each in modules]


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the parts of each stage: the most expensive stage is as cheap, and all are as even, as can be.

    Every stage takes at least one part; WorkbookError if there are too few.
    """
    n = len(costs)
    if stages > n:
        raise WorkbookError(
            f"{n} parts cannot be cut into {stages} stages: take fewer ranks or --chunks, or more --layers."
        )
    until = [0.0, *accumulate(costs)]

    @cache
    def best(start: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Return, for the parts from `start` on, the largest cost of a stage, the sum of squared costs, and
        where each stage ends."""
        found = []
        for end in range(start + 1, n - stages + 2) if stages > 1 else [n]:
            cost = until[end] - until[start]
            largest, squares, ends = best(end, stages - 1) if stages > 1 else (0.0, 0.0, ())
            found.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        # Of equal cuts take the last one: a part that costs nothing, such as an activation function, then
        # goes with the part before it.
        return min(found, key=lambda each: (*each[:2], [-end for end in each[2]]))

    *_, ends = best(0, stages)
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
