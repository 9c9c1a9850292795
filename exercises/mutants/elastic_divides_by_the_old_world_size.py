"""Survivors of a death divide by the number of ranks before it."""

import torch
from torch import Tensor

from comm.collectives import all_reduce

TARGET = "hybrid_parallel.elastic.elastic.ElasticReplica.step"
KILLER = (
    "tests.hybrid_parallel.test_elastic."
    "test_two_deaths_one_of_them_rank_0s_leave_every_gradient_that_of_one_process"
)
CAUSE = "fewer ranks share the batch"
SYMPTOM = "After a death gradients are too small, and with Adam the loss looks normal."


def mutant(self, x: Tensor, y: Tensor, rank: int, ranks: int) -> Tensor:
    self.first_ranks = getattr(self, "first_ranks", ranks)
    self.optimizer.zero_grad()
    mine = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    loss = self.sum_of_losses(self.model, *mine) / len(x) * ranks
    loss.backward()
    trained = [p for p in self.model.parameters() if p.requires_grad]
    flat = torch.cat([self._gradient(p).flatten() for p in trained] + [loss.detach().view(1)])
    all_reduce(flat, op="sum")
    *gradients, mean_loss = (flat / self.first_ranks).split([p.numel() for p in trained] + [1])
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    self.optimizer.step()
    self.steps += 1
    return mean_loss[0]
