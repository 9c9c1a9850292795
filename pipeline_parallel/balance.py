"""Cut a model into stages by what its parts cost: the slowest stage sets the pace of a pipeline.

costs   4 1 1 2 2 2        a part costs its number of parameters, the seconds that it takes here,
cut     4|1 1 2|2 2        or a number that you give; the most expensive stage is as cheap as can be

split=[1, 3, 2]            or you say how many parts each stage takes
"""

import dataclasses
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import broadcast
from lab.launch.errors import WorkbookError
from lab.models.parts import Part, as_sequential, parts_of
from lab.trace.stream_clock import time_when_done
from pipeline_parallel.stage import Stage, refuse_too_many

Costs = Sequence[float] | str | None


@dataclasses.dataclass
class BalanceArgs:
    """The option of scripts that cut a model by its costs."""

    balance: Literal["layers", "parameters", "time"] = "layers"
    """Give the stages about equally many layers or parameters, or layers that take equally long on rank 0."""

    @property
    def costs(self) -> str | None:
        """Return the costs by which the model is cut."""
        return None if self.balance == "layers" else self.balance


def balanced_stages(
    model: nn.Module | Sequence[nn.Module],
    stages: int,
    example: Tensor,
    costs: Costs = None,
    split: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Stage]:
    """Return the model cut into that many stages, in the same way on all ranks of `group`.

    The model is cut by `costs`: a number for each part, "parameters", "time", or None, by which an
    nn.Sequential is cut by its parameters and a GPT by its blocks. `split` says instead how many parts each
    stage takes.
    """
    model = as_sequential(model)
    parts = parts_of(model)
    if split is not None:
        if len(split) != stages or sum(split) != len(parts) or min(split) < 1:
            raise WorkbookError(
                f"split={list(split)} does not divide the model's {len(parts)} parts into {stages} stages: "
                f"give {stages} numbers of at least 1 whose sum is {len(parts)}."
            )
        ends = list(accumulate(split))
        ranges = [range(end - size, end) for end, size in zip(ends, split, strict=True)]
    else:
        if costs == "time":
            measured = torch.tensor(
                measured_costs(model, example), dtype=torch.float64, device=example.device
            )
            broadcast(measured, root=0, group=group)  # so that all ranks cut the model in the same way
            costs = measured.tolist()
        ranges = cut(costs_of(model, parts, costs), stages)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


def costs_of(model: nn.Module, parts: list[Part], costs: Costs) -> list[float]:
    """Return the cost of each part: by default a number of blocks, or the given number.

    The parts of an nn.Sequential cost their numbers of parameters by default.
    """
    if costs is None and not isinstance(model, nn.Sequential):
        return [float(part.layers) for part in parts]
    if costs is None or isinstance(costs, str):
        if costs not in (None, "parameters"):
            raise WorkbookError(f"costs={costs!r} is unknown: give 'parameters', 'time' or numbers.")
        return [float(num_parameters(*map(model.get_submodule, part.modules))) for part in parts]
    if len(costs) != len(parts):
        raise WorkbookError(f"costs has {len(costs)} numbers, and the model has {len(parts)} parts.")
    return list(costs)


def num_parameters(*modules: nn.Module) -> int:
    """Return how many numbers the modules' parameters have; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the parts of each stage: the most expensive stage is as cheap, and all are as even, as can be.

    Every stage takes at least one part; WorkbookError if there are too few.
    """
    n = len(costs)
    refuse_too_many(stages, n)
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


def measured_costs(model: nn.Module, x: Tensor, repeats: int = 5) -> list[float]:
    """Return the median seconds of each part's forward and backward on this device, on the microbatch `x`.

    Gradients, random numbers and buffers are afterwards what they were.
    """
    costs = []
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for part in parts_of(model):
            stage, seconds = Stage(model, [part]), []
            for _ in range(repeats + 1):
                inputs = x.detach().requires_grad_(x.is_floating_point())
                start = time_when_done(x.device)
                y = stage(inputs)
                if y.requires_grad:
                    given = [each for each in (inputs, *stage.parameters()) if each.requires_grad]
                    torch.autograd.grad(y, given, torch.ones_like(y), allow_unused=True)
                seconds.append((time_when_done(x.device) - start) / 1e9)
            costs.append(statistics.median(seconds[1:]))
            x = y.detach()
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return costs
