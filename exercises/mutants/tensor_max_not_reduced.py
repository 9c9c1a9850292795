"""All subtract the first rank's largest logit: right until another rank's is far above it, then infinite."""

import torch
from torch import Tensor

from comm.collectives import all_reduce, broadcast
from tensor_parallel.layers import local_words

TARGET = "tensor_parallel.cross_entropy._CrossEntropy.forward"
KILLER = "tests.tensor_parallel.test_cross_entropy.test_the_largest_logit_of_all_ranks_counts_not_this_ranks"


def mutant(
    ctx, logits: Tensor, targets: Tensor, num_words: int, group, ignore: int, smoothing: float
) -> Tensor:
    """Compute the loss for a vocabulary without padding, and without label smoothing."""
    largest = logits.amax(-1)
    broadcast(largest, root=0, group=group)
    exps = (logits - largest.unsqueeze(-1)).exp()
    mine, is_mine = local_words(targets, logits.shape[-1], num_words, group)
    at_target = logits.gather(-1, mine.unsqueeze(-1)).squeeze(-1) * is_mine
    sums = torch.stack([exps.sum(-1), at_target])
    all_reduce(sums, group=group)
    total, at_target = sums
    counted = targets != ignore
    ctx.save_for_backward(exps, total, mine, is_mine, counted)
    ctx.smoothing, ctx.num_words, ctx.words, ctx.dtype = 0.0, num_words, logits.shape[-1], logits.dtype
    return (total.log() + largest - at_target).where(counted, 0).sum() / counted.sum()
