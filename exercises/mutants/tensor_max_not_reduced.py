"""The loss is infinite when a logit on another rank is far above rank 0's largest logit."""

import torch
from torch import Tensor

from comm.collectives import all_reduce, broadcast
from tensor_parallel.layers import own_rows

TARGET = "tensor_parallel.cross_entropy._CrossEntropy.forward"
KILLER = "tests.tensor_parallel.test_cross_entropy.test_the_largest_logit_of_all_ranks_is_subtracted"
CAUSE = "subtract the largest value of all ranks"


def mutant(
    ctx, logits_tv: Tensor, targets: Tensor, vocab_size: int, group, ignore: int, smoothing: float
) -> Tensor:
    """Compute the loss for a vocabulary without padding, and without label smoothing."""
    largest = logits_tv.amax(-1)
    broadcast(largest, root=0, group=group)
    exps_tv = (logits_tv - largest.unsqueeze(-1)).exp()
    rows, is_own = own_rows(targets, logits_tv.shape[-1], vocab_size, group)
    at_target = logits_tv.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * is_own
    sums = torch.stack([exps_tv.sum(-1), at_target])
    all_reduce(sums, group=group)
    total, at_target = sums
    counts = targets != ignore
    ctx.save_for_backward(exps_tv, total, rows, is_own, counts)
    ctx.smoothing, ctx.vocab_size, ctx.v, ctx.dtype = 0.0, vocab_size, logits_tv.shape[-1], logits_tv.dtype
    return (total.log() + largest - at_target).where(counts, 0).sum() / counts.sum()
