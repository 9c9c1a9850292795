"""Divide the experts of each block among replicas, which are neighbours along the data and context axes.

      8 replicas, 4 experts, expert_ranks 2

      replica              0     1       2     3       4     5       6     7
      experts              0 1   2 3     0 1   2 3     0 1   2 3     0 1   2 3
      exchange tokens      |- group -|   |- group -|   |- group -|   |- group -|
      average an expert    0 2 4 6 with each other, and 1 3 5 7

A block sends its tokens to their experts and back, as in lesson 7. Stages of a pipeline have the experts of
their own blocks. The tensor axis divides each expert as it divides an MLP: its ranks have the same tokens, make
the same choice, and send the same tokens.

The auxiliary loss arises in every block, but only the last stage has the loss. So a block adds its term where
it arises: in the backward, `AddToLoss` gives it the gradient that a term of the loss has.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from comm.chosen_pattern import use_pattern
from data_parallel.train_bucket_overlap import BucketDataParallel, traffic_per_step
from expert_parallel.config import MoEConfig
from expert_parallel.expected_traffic import counts_traffic, exchange_traffic, tokens_between
from expert_parallel.groups import ExpertGroups
from expert_parallel.train_moe import MixtureOfExperts
from lab.ledger import Traffic
from lab.model import GPT, GPTConfig


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

    `sent` has, for each forward in training mode since the last `forget`, how many tokens each rank has sent
    to each expert.
    """

    def __init__(
        self, config: GPTConfig, moe: MoEConfig, groups: ExpertGroups, seed: int, layer: int, weight: float
    ) -> None:
        super().__init__(config, moe, groups, seed, layer)
        self._weight = weight
        self.sent: list[Tensor] = []

    def forward(self, x_btd: Tensor) -> Tensor:
        if x_btd.is_meta:  # a pipeline finds out shapes
            return torch.empty_like(x_btd)
        y_btd = super().forward(x_btd)
        if not self.training:
            return y_btd
        self.sent.append(self.sent_rE)
        return AddToLoss.apply(y_btd, self._weight * self.auxiliary_loss) if self._weight else y_btd


class ExpertAxis:
    """Replaces the MLPs of a GPT by experts, and keeps what this rank has of them.

    `weight` is the number by which the auxiliary loss of a microbatch is multiplied.
    """

    def __init__(
        self, model: GPT, moe: MoEConfig, groups: ExpertGroups, weight: float, seed: int, pattern: str | None
    ) -> None:
        self.moe, self.groups = moe, groups
        for group in (groups.experts, groups.replicas):
            use_pattern(pattern, group)
        for number, block in enumerate(model.blocks):
            layer = BalancedExperts(model.config, moe, groups, seed, number, weight)
            block.mlp = layer.to(model.token_embedding.weight)

    def layers_of(self, module: nn.Module) -> list[BalancedExperts]:
        """Return the mixtures of experts of a stage or model."""
        return [layer for layer in module.modules() if isinstance(layer, BalancedExperts)]

    def experts_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts in a stage or model."""
        return [p for layer in self.layers_of(module) for p in layer.experts.parameters()]

    def forget(self, module: nn.Module) -> None:
        """Forget the counts of earlier steps."""
        for layer in self.layers_of(module):
            layer.sent.clear()


class ReplicatedExperts:
    """Averages gradients over all replicas, and those of an expert over the replicas that hold it.

    It has the methods of BucketDataParallel.
    """

    def __init__(self, module: nn.Module, axis: ExpertAxis, pattern: str | None) -> None:
        self._experts, self._ranks = axis.experts_of(module), axis.groups.num_expert_ranks
        own = set(self._experts)
        dense = [parameter for parameter in module.parameters() if parameter not in own]
        both = (dense, axis.groups.everyone), (self._experts, axis.groups.replicas)
        self._parts = [BucketDataParallel(nn.ParameterList(p), group, pattern) for p, group in both]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up inside of the block, and send nothing."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.no_sync())
            yield

    def finish_gradient_sync(self) -> None:
        """Complete the means. An expert's gradient is a sum over the tokens of its expert group."""
        for part in self._parts:
            part.finish_gradient_sync()
        for parameter in self._experts:
            if parameter.grad is not None:
                parameter.grad.as_subclass(Tensor).div_(self._ranks)

    def traffic_per_step(self) -> Traffic:
        """Return what this rank sends in a step."""
        return sum((traffic_per_step(part, part.pattern) for part in self._parts), Traffic())


def exchanged(layer: BalancedExperts, itemsize: int, forwards_per_backward: int) -> tuple[Traffic, Traffic]:
    """Return what this rank has sent for a layer: tokens along the expert axis, and counts along the data axis.

    `itemsize` is the bytes of a number of a token.
    """
    groups, width = layer.groups, layer.router.weight.shape[1]
    tokens = counts = Traffic()
    for number, sent_rE in enumerate(layer.sent):
        counts += counts_traffic(sent_rE, groups)
        there = tokens_between(sent_rE, groups)
        once = sum(
            (exchange_traffic(sent_rr, width, itemsize, groups.experts) for sent_rr in (there, there.T)),
            Traffic(),
        )
        has_backward = number % forwards_per_backward == 0
        tokens += once + once if has_backward else once
    return tokens, counts
