"""Compute a mixture of experts on one process: each expert computes all tokens, and a mask chooses."""

import math

import torch
from torch import Tensor, nn

from expert_parallel.config import MoEConfig
from lab.models.model import GPT
from tests.expert_parallel.reference import NaiveMixture


class PlainMixture(NaiveMixture):
    """A NaiveMixture that computes all tokens at once."""

    def forward(self, x_btd: Tensor) -> Tensor:
        rows, moe = x_btd.flatten(0, 1), self.moe
        self.probabilities = (rows @ self.router.weight.T).softmax(-1)
        chosen_tE = torch.zeros_like(self.probabilities).scatter(
            1, (self.probabilities.detach() + self.router.bias_E).topk(moe.top_k).indices, 1.0
        )
        self.counts = chosen_tE.sum(0).int().tolist()
        if moe.capacity is not None:
            of_each_rank = chosen_tE.unflatten(0, (self.num_ranks, -1))
            limit = math.ceil(moe.capacity * of_each_rank.shape[1] * moe.top_k / moe.num_experts)
            fits = (of_each_rank.cumsum(1) <= limit).flatten(0, 1)
            self.dropped += int((chosen_tE * ~fits).sum())
            chosen_tE = chosen_tE * fits
        weights_tE = chosen_tE * self.probabilities
        outputs = (weights_tE[:, e, None] * self.experts[str(e)](rows) for e in range(moe.num_experts))
        return sum(outputs, torch.zeros_like(rows)).view_as(x_btd)


def with_plain_experts(model: GPT, moe: MoEConfig, num_ranks: int) -> GPT:
    """Return the model with a PlainMixture in each block, whose weights are not set."""
    for block in model.blocks:
        block.mlp = PlainMixture(model.config, moe, num_ranks).to(model.head.weight)
    return model


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum over blocks of the auxiliary losses of the last forward; 0 without experts."""
    layers = (module for module in model.modules() if isinstance(module, PlainMixture))
    return sum((layer.auxiliary_loss() for layer in layers), torch.zeros(()))
