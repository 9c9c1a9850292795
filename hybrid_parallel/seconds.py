"""Hold what the planner predicts of the time of a step and of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause; their sum is the step."""

    compute: float  # of the slowest stage, or of the mean one on shared cores; recomputation included
    tensor: float  # collectives of the tensor and the context axis
    bubble: float
    messages: float
    data: float  # what is not hidden
    optimizer: float
    overhead: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """Holds the seconds of a forward or a backward of one layer: computing, and waiting for collectives."""

    compute: float
    tensor: float

    @property
    def total(self) -> float:
        """Return the sum of both."""
        return self.compute + self.tensor
