"""Answer for what a rank has of a model: its loss, the gradients that count in its norm, its state.

      ContextParallel               some tokens
        TensorParallel              a shard of each layer
          ExpertParallel            some of the experts
          or ModelOnRank(model)     all of a GPT or MLP

Each answers for its own axis, and its `inner` for the rest. All but ContextParallel are a ModelOnRank.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group
from lab.models.model import loss_of
from training import clipping, evaluation
from training.state_shards import StateShard, plain_shards


class ModelOnRank(nn.Module):
    """All of a GPT or MLP, with what the other axes ask about it; a subclass has a part of it."""

    dims: Mapping[str, tuple[int, int]] = {}  # of each divided parameter: the dimension, and its full size
    held: Mapping[nn.Parameter, nn.Parameter] | None = None  # with ZeRO: this rank's shard of each parameter
    module: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def plain(self) -> Any:
        """Return the GPT or MLP, whose names parameters have in a state."""
        return self.module

    def forward(self, x: Tensor, *positions: Tensor) -> Tensor:
        return self.module(x, *positions)

    def loss(self, outputs: Tensor, y: Tensor, num_targets: float | None = None) -> Tensor:
        """Return the loss: the sum over valid targets, divided by their number or by `num_targets`."""
        return loss_of(outputs, y, num_targets)

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Return the sums over held-out examples; None if another rank counts the same outputs."""
        return self.sums_of(self(x), y, counts)

    def sums_of(self, outputs: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Do what `evaluation_sums` does, with outputs that a wrapper around this one has computed."""
        return evaluation.sums_of(outputs, y, counts)

    def finish_gradient_sync(self) -> None:
        """Complete the gradients of which ranks have terms: here there are none."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as torch's clip_grad_norm_ does on the full model: shards add up, replicas count once."""
        parameters, uncounted = self.plain.parameters(), self.counted_elsewhere()
        return clipping.clip_grad_norm_(parameters, max_norm, self.norm_groups, norm_type, uncounted)

    @property
    def norm_groups(self) -> list[Group]:
        """Return the groups over which the squares of gradients add up, one after the other."""
        return []

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Return the parameters of this rank whose gradients count on another rank of these groups."""
        return set()

    def full_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a copy of the full state, or of the `state` of a wrapper around it. All ranks call it."""
        state = self.plain.state_dict() if state is None else state
        return {name: tensor.clone() for name, tensor in state.items()}

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what this rank holds of the plain model's state."""
        self.plain.load_state_dict(state)

    def state_shards(self, optimizer: torch.optim.Optimizer) -> list[StateShard]:
        """Return what this rank holds of each full tensor of the model and of the optimizer's state."""
        return plain_shards(self.plain, optimizer)

    def place_of(self, name: str, parameter: Tensor) -> tuple[list[int], list[int]]:
        """Return the shape of the full tensor, and where this rank's part of it begins."""
        return list(parameter.shape), [0] * parameter.dim()


def model_on_rank(module: nn.Module) -> ModelOnRank:
    """Return a ModelOnRank as it is, and a plain model as one that is whole on this rank."""
    return module if isinstance(module, ModelOnRank) else ModelOnRank(module)
