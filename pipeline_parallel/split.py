"""Decide which parts of the model each stage takes: by cost, or as given.

      costs   4 1 1 2 2 2        a part costs its number of parameters, the seconds that it takes here,
      cut     4|1 1 2|2 2        or a number that you give; the most expensive stage is as cheap as can be

      split=[1, 3, 2]            or you say how many parts each stage takes

The slowest stage sets the pace of the pipeline: the others wait for its messages.
"""

import statistics
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from lab.trace.stream_clock import time_when_done
from pipeline_parallel.stage import Part, Stage, num_parameters, parts_of


def costs_of(model: nn.Module, parts: list[Part], costs: Sequence[float] | str | None) -> list[float]:
    """Return the cost of each part: `Part.cost` by default, its number of parameters, or the given number."""
    if costs is None:
        return [part.cost for part in parts]
    if isinstance(costs, str):
        if costs != "parameters":
            raise WorkbookError(
                f"costs={costs!r} is unknown: give 'parameters', 'time' or a number for each part."
            )
        return [float(num_parameters(*map(model.get_submodule, part.modules))) for part in parts]
    if len(costs) != len(parts):
        raise WorkbookError(f"costs has {len(costs)} numbers, and the model has {len(parts)} parts.")
    return list(costs)


def split_as_given(num_parts: int, split: Sequence[int], stages: int) -> list[range]:
    """Return the parts of each stage, of which `split` says how many. WorkbookError if it does not fit."""
    if len(split) != stages:
        raise WorkbookError(f"split={list(split)} is for {len(split)} stages, and the schedule has {stages}.")
    if sum(split) != num_parts or min(split) < 1:
        raise WorkbookError(
            f"split={list(split)} does not divide the model's {num_parts} parts: give numbers of at least 1 "
            f"whose sum is {num_parts}."
        )
    ends = list(accumulate(split))
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the parts of each stage: the most expensive stage is as cheap, and all are as even, as can be.

    A part that costs nothing, such as an activation function, goes with the part before it where that is no
    worse: it often works in place, or makes the message smaller. Every stage takes at least one part;
    WorkbookError if there are too few.
    """
    n = len(costs)
    if stages > n:
        raise WorkbookError(
            f"{n} parts cannot be cut into {stages} stages: take fewer ranks or --chunks, or more --layers."
        )
    until = [0.0, *accumulate(costs)]

    @cache
    def best(start: int, stages: int) -> tuple[float, float, int, tuple[int, ...]]:
        """Return, for the parts from `start` on, the largest cost of a stage, the sum of squared costs, how
        many stages but the first begin with a part that costs nothing, and where each stage ends."""
        found = []
        for end in range(start + 1, n - stages + 2) if stages > 1 else [n]:
            cost = until[end] - until[start]
            largest, squares, free, ends = best(end, stages - 1) if stages > 1 else (0.0, 0.0, 0, ())
            free += end < n and costs[end] == 0
            found.append((max(cost, largest), cost**2 + squares, free, (end, *ends)))
        return min(found)

    *_, ends = best(0, stages)
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def measured_costs(model: nn.Module, x: Tensor, repeats: int = 5) -> list[float]:
    """Return the median seconds of each part's forward and backward on this device, on the microbatch `x`.

    Gradients, random numbers and buffers, such as the statistics of a BatchNorm, are afterwards what they
    were.
    """
    costs = []
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for part in parts_of(model):
            stage, seconds = Stage(model, [part]), []
            for _ in range(repeats + 1):
                inputs = x.detach().requires_grad_(x.is_floating_point())
                start = time_when_done(x.device)
                y = stage(inputs)
                if y.requires_grad:
                    y.backward(torch.ones_like(y))
                seconds.append((time_when_done(x.device) - start) / 1e9)
            costs.append(statistics.median(seconds[1:]))
            x = y.detach()
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    return costs
