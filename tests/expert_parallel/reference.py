"""Compute a mixture of experts on one process, token by token, without the lesson's code.

The names of parameters and buffers are the lesson's, so tensors can be compared by name.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from expert_parallel.config import MoEConfig
from lab.models.model import GPT, FeedForward, GPTConfig


class NaiveRouter(nn.Module):
    def __init__(self, config: GPTConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.width))
        self.register_buffer("bias_E", torch.zeros(moe.num_experts))


class NaiveMixture(nn.Module):
    """All experts in one place. Each of `num_ranks` equal parts of the tokens has its own capacity."""

    def __init__(self, config: GPTConfig, moe: MoEConfig, num_ranks: int) -> None:
        super().__init__()
        self.moe, self.num_ranks = moe, num_ranks
        self.router = NaiveRouter(config, moe)
        self.experts = nn.ModuleDict({str(e): FeedForward(config) for e in range(moe.num_experts)})
        self.shared = FeedForward(config) if moe.shared else None
        self.dropped = 0

    def forward(self, x_btd: Tensor) -> Tensor:
        rows, results, taken = x_btd.flatten(0, 1), [], {}
        of_each_rank = len(rows) // self.num_ranks
        self.counts, self.dropped = [0] * self.moe.num_experts, 0
        limit = math.inf
        if self.moe.capacity is not None:
            limit = math.ceil(self.moe.capacity * of_each_rank * self.moe.top_k / self.moe.num_experts)
        exponentials = (rows @ self.router.weight.T).exp()
        self.probabilities = exponentials / exponentials.sum(1, keepdim=True)
        for t, row in enumerate(rows):
            rank, y = t // of_each_rank, torch.zeros_like(row) if self.shared is None else self.shared(row)
            scores = (self.probabilities[t] + self.router.bias_E).tolist()
            best = sorted(range(len(scores)), key=lambda e, scores=scores: -scores[e])
            for e in best[: self.moe.top_k]:
                self.counts[e] += 1
                taken[rank, e] = taken.get((rank, e), 0) + 1
                if taken[rank, e] > limit:
                    self.dropped += 1
                else:
                    y = y + self.probabilities[t, e] * self.experts[str(e)](row)
            results.append(y)
        return torch.stack(results).view_as(x_btd)

    def auxiliary_loss(self) -> Tensor:
        total = sum(self.counts)
        shares = [count / total * self.probabilities[:, e].mean() for e, count in enumerate(self.counts)]
        return self.moe.num_experts * torch.stack(shares).sum()

    def move_bias(self, rate: float) -> None:
        mean = sum(self.counts) / len(self.counts)
        for e, count in enumerate(self.counts):
            self.router.bias_E[e] += rate * ((count < mean) - (count > mean))


def gpt(seed: int = 0, **changes: Any) -> GPT:
    sizes = {"vocab_size": 31, "block_size": 8, "num_layers": 2, "num_heads": 2, "width": 8}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def naive_gpt(moe: MoEConfig, num_ranks: int, **changes: Any) -> GPT:
    """Return a GPT with naive mixtures; the weights of these are not set."""
    model = gpt(0, **changes)
    for block in model.blocks:
        block.mlp = NaiveMixture(model.config, moe, num_ranks).double()
    return model


def text() -> tuple[Tensor, Tensor]:
    """Return a global batch that 1 to 4 ranks can divide."""
    tokens = torch.randint(31, (12, 3), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]
