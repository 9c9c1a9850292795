"""Answer for a model's layers: which part of each this rank has, which gradients it counts, what the loss is.

      all of each layer      PlainModel
      some of the experts    ExpertModel (expert_axis.py), in place of the MLPs
      a part of each layer   TensorParallel (lesson 3), which goes around one of the other two

All of them have the methods of PlainModel. TensorParallel adds its own axis to what the model in it answers.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from comm.collectives import Group
from lab.models.model import GPT, MLP, loss_of
from training.evaluation import sums_of


class PlainModel(nn.Module):
    """A model that no rank divides, with what the other axes ask about it."""

    dims: Mapping[str, tuple[int, int]] = {}  # of each divided parameter: the dimension, and its full size
    held: Mapping[nn.Parameter, nn.Parameter] | None = None  # with ZeRO: this rank's shard of each parameter

    def __init__(self, plain: GPT | MLP) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)

    def loss(self, outputs: Tensor, y: Tensor, num_targets: float | None = None) -> Tensor:
        """Return the loss: the sum over valid targets, divided by their number or by `num_targets`."""
        return loss_of(outputs, y, num_targets)

    def sums_of(self, outputs: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Return the sums over held-out examples; None on ranks that have the outputs of another rank."""
        return sums_of(outputs, y, counts)

    def finish_gradient_sync(self) -> None:
        """Complete the gradients of which ranks have terms: here there are none."""

    @property
    def norm_groups(self) -> list[Group]:
        """Return the groups over which the squares of gradients add up, one after the other."""
        return []

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Return the parameters of this rank whose gradients count on another rank of these groups."""
        return set()

    def full_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a copy of the full state dict, or of the `state` that a wrapper has put together."""
        state = self.plain.state_dict() if state is None else state
        return {name: tensor.clone() for name, tensor in state.items()}

    def place_of(self, name: str, parameter: Tensor) -> tuple[list[int], list[int]]:
        """Return the shape of the full tensor, and where this rank's part of it begins."""
        return list(parameter.shape), [0] * parameter.dim()
