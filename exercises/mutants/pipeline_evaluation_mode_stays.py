"""After the first evaluation training continues without dropout, and the model overfits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

TARGET = "lab.evaluation.evaluating"
KILLER = "tests.pipeline_parallel.test_forward_only.test_training_goes_on_with_dropout_after_an_evaluation"
CAUSE = "training mode again"


@contextmanager
def mutant(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
