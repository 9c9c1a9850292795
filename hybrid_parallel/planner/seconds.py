"""Hold the predicted seconds of a step and of a layer, and predict those of a collective."""

from dataclasses import dataclass

from comm import cost
from comm.cost import Link


def collective(op: str, size: float, ranks: int, link: Link, pattern: str = "ring") -> float:
    """Return the seconds of a collective on a full tensor of `size` bytes; by default it is a ring."""
    return cost.seconds(op, pattern, round(size), ranks, link)


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause. Their sum is the time of the step."""

    compute: float  # of the slowest rank, or of the mean rank of a pipeline on shared cores
    tensor: float  # waiting for collectives of the tensor axis
    context: float  # waiting for the tokens of other ranks of the context axis
    experts: float  # waiting for tokens on their way to experts and back
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

    compute: float = 0.0  # recomputation included
    tensor: float = 0.0  # waiting, as in Seconds
    context: float = 0.0
    experts: float = 0.0

    @property
    def waiting(self) -> float:
        """Return the seconds in which a core could do something else."""
        return self.tensor + self.context + self.experts

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.compute + self.waiting

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.experts + other.experts,
        )
