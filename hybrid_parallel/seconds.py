"""Hold the predicted seconds of a step and of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause. Their sum is the time of the step."""

    compute: float  # of the slowest rank, or of the mean rank of a pipeline on shared cores
    tensor: float  # waiting for collectives of the tensor axis and of the context axis
    bubble: float  # the slowest rank is idle in the pipeline
    messages: float  # between stages, where the bubble does not include them
    data: float  # collectives of the data axis, without what computation hides
    optimizer: float
    overhead: float  # what no formula predicts (machine.py)

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """Holds the seconds of one layer's forward, input gradient or weight gradient, for one microbatch."""

    compute: float  # recomputation included
    tensor: float  # waiting for collectives of the tensor axis and of the context axis

    @property
    def total(self) -> float:
        """Return the sum of both."""
        return self.compute + self.tensor
