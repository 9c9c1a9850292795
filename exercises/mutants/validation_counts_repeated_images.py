"""The validation loss and accuracy of digits change with the batch size: a few images count twice."""

import torch
import torch.nn.functional as F
from torch import Tensor

TARGET = "training.evaluation.sums_of"
KILLER = "tests.training.test_evaluation.test_repeated_images_do_not_count"
CAUSE = "count twice"


def mutant(outputs: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum")
    return torch.stack([losses, (outputs.argmax(-1) == y).sum()]).double()
