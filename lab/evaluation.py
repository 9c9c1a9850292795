"""Evaluate a model that is in training, and leave it as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, without gradients, and restore each submodule's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
