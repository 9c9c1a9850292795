"""The validation loss falls as the training loss does, however much the model overfits."""

from collections.abc import Iterator

from torch import Tensor

from training.data import VALIDATION_BATCHES, TrainingData

TARGET = "training.data.TrainingData.held_out"
KILLER = "tests.training.test_evaluation.test_what_is_validated_is_not_trained_on"
CAUSE = "are its examples also trained on"


def mutant(self: TrainingData) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for step in range(VALIDATION_BATCHES):
        x, y = self.batch(step)
        yield x, y, y[:, 0] >= 0
