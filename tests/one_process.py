"""Compare the training of a divided model with that of one process: each gradient, and each parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.check import assert_same, gradients, parameters

RTOL = 1e-9
Named = dict[str, Tensor | None]


def train_both(
    reference: nn.Module,
    ours: nn.Module,
    backward: Callable[[int], Any],
    full: Callable[[Named], Named] = dict,
    steps: int = 2,
    what: str = "",
    gradients_of: Callable[[nn.Module], Named] = gradients,
) -> None:
    """Compare two models that start with equal parameters, in each step of SGD and after the last one.

    `backward(step)` computes the gradients of both, and completes those of `ours`. `full` turns this rank's
    shards into full tensors by the reference's names.
    """
    assert_same(full(parameters(ours)), parameters(reference), 0, f"initial parameter, {what},")
    # foreach=False: with the default on GPUs either all parameters must be DTensors, or none.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, foreach=False) for model in (reference, ours)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(step)
        found = full(gradients_of(ours))
        assert_same(found, gradients_of(reference), RTOL, f"gradient, {what}, step {step},")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(full(parameters(ours)), parameters(reference), RTOL, f"parameter, {what},")
