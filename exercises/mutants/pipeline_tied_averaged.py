"""A tied embedding learns at half the rate: its two gradients are averaged instead of added."""

import torch

from comm.point_to_point import irecv, isend

TARGET = "pipeline_parallel.pipeline.Pipeline.finish_gradient_sync"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
CAUSE = "divided by their number once too often"


def mutant(self) -> None:
    for mine, peer in self._shared():
        others = torch.empty_like(mine.grad)
        arriving, leaving = irecv(others, peer, self.group), isend(mine.grad, peer, self.group)
        arriving.wait()
        leaving.wait()
        mine.grad = (mine.grad + others) / 2
