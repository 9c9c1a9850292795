"""Divide the experts of each block among replicas, which are neighbours along the data and context axes.

      8 replicas, 4 experts, expert_ranks 2

      replica              0     1       2     3       4     5       6     7
      experts              0 1   2 3     0 1   2 3     0 1   2 3     0 1   2 3
      exchange tokens      |- group -|   |- group -|   |- group -|   |- group -|
      average an expert    0 2 4 6 with each other, and 1 3 5 7

A block sends its tokens to their experts and back, as in lesson 7. Stages of a pipeline have the experts of
their own blocks. The tensor axis divides each expert as it divides an MLP: its ranks have the same tokens,
make the same choice, and send the same tokens.

The auxiliary loss arises in every block, but only the last stage has the loss. So a block adds its term where
it arises: in the backward, `AddToLoss` gives it the gradient that a term of the loss has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from comm.collectives import Group
from data_parallel.train_bucket_overlap import BucketDataParallel
from expert_parallel.config import ExpertGroups, MoEConfig
from expert_parallel.full_state import full_state
from expert_parallel.train_moe import MixtureOfExperts
from lab.models.model import GPT, GPTConfig
from lab.trace.ledger import Traffic
from training.model_on_rank import ModelOnRank


class AddToLoss(torch.autograd.Function):
    """Return `x` unchanged, and add `term` to the loss in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        ctx.like = term
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


class BalancedExperts(MixtureOfExperts):
    """A mixture of experts that adds `weight` times its auxiliary loss to the loss.

    `chosen` and `sent` have, for each forward in training mode since `forget`, how many tokens of each rank
    have chosen each expert, and how many it has sent there.
    """

    def __init__(
        self, config: GPTConfig, moe: MoEConfig, groups: ExpertGroups, seed: int, layer: int, weight: float
    ) -> None:
        super().__init__(config, moe, groups, seed, layer)
        self._weight = weight
        self.forget()

    def forget(self) -> None:
        """Forget the counts of earlier forwards."""
        self.chosen: list[Tensor] = []
        self.sent: list[Tensor] = []

    def forward(self, x_btd: Tensor) -> Tensor:
        if x_btd.is_meta:  # a pipeline learns shapes
            return torch.empty_like(x_btd)
        device = x_btd.device.type
        if torch.is_autocast_enabled(device):  # router and experts compute in these numbers: send them, too
            x_btd = x_btd.to(torch.get_autocast_dtype(device))
        y_btd = super().forward(x_btd)
        if not self.training or not self._weight:
            return y_btd
        return AddToLoss.apply(y_btd, self._weight * self.auxiliary_loss)

    def count(self, experts_tk: Tensor) -> tuple[Tensor, Tensor]:
        # Here, because a forward that is recomputed may stop before its end.
        chosen_rE, sent_rE = super().count(experts_tk)
        if self.training:
            self.chosen.append(chosen_rE)
            self.sent.append(sent_rE)
        return chosen_rE, sent_rE


@dataclass(frozen=True)
class Experts:
    """Holds what experts a model has, the weight of their auxiliary loss, and the seed of their weights."""

    moe: MoEConfig
    aux_weight: float = 0.01
    seed: int = 0


class ExpertModel(ModelOnRank):
    """A GPT with experts in place of its MLPs, of which this rank has some.

    The auxiliary loss of a step is the mean over its microbatches, each with the tokens of all replicas.
    """

    def __init__(self, plain: GPT, experts: Experts, groups: ExpertGroups, microbatches: int) -> None:
        super().__init__(plain)
        self.groups, weight = groups, experts.aux_weight / microbatches
        for number, block in enumerate(plain.blocks):
            layer = BalancedExperts(plain.config, experts.moe, groups, experts.seed, number, weight)
            block.mlp = layer.to(plain.token_embedding.weight)

    @property
    def norm_groups(self) -> list[Group]:
        return [self.groups.experts]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        counted = expert_parameters_of(self.plain) if self.groups.rank > 0 else self.plain.parameters()
        return {*self.plain.parameters()} - {*counted}

    def full_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return full_state(self.plain.state_dict() if state is None else state, self.groups)


def expert_layers_of(module: nn.Module) -> list[BalancedExperts]:
    """Return the mixtures of experts of a stage or model."""
    return [layer for layer in module.modules() if isinstance(layer, BalancedExperts)]


def expert_parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this rank's experts in a stage or model."""
    return [parameter for layer in expert_layers_of(module) for parameter in layer.experts.parameters()]


class ReplicatedExperts:
    """Averages gradients over all replicas, and those of an expert over the replicas that hold it.

    It has the methods of BucketDataParallel.
    """

    def __init__(self, module: nn.Module, groups: ExpertGroups) -> None:
        self._experts, self._ranks = expert_parameters_of(module), groups.num_expert_ranks
        own = set(self._experts)
        dense = [parameter for parameter in module.parameters() if parameter not in own]
        both = (dense, groups.everyone), (self._experts, groups.replicas)
        self._parts = [BucketDataParallel(nn.ParameterList(p), group) for p, group in both]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward sends gradients: False in all microbatches but the last."""
        return self._parts[0].require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_last: bool) -> None:
        for part in self._parts:
            part.require_backward_grad_sync = is_last

    def finish_gradient_sync(self) -> None:
        """Complete the means. An expert's gradient is a sum over the tokens of its expert group."""
        for part in self._parts:
            part.finish_gradient_sync()
        for parameter in self._experts:
            if parameter.grad is not None:
                parameter.grad /= self._ranks

    def traffic(self) -> Traffic:
        """Return what this rank sends in a step."""
        return sum((part.traffic() for part in self._parts), Traffic())
