"""Compute the cross entropy of logits that are divided by vocabulary, with two small all-reduces.

      rank 0   logits of the first v entries  max ─┐                  sum of exp ─┐
      rank 1   logits of the next v entries   max ─┴─ max over ranks  sum of exp ─┴─ sum over ranks ─► loss
                                                                      target's   ─┘

      loss of a token = log(sum of exp(logit - max)) + max - logit of the target

The full logits are by far the largest activation of a model with a large vocabulary: n times what a rank
holds here. The ranks all-reduce three numbers for each token. After Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, section 3.

Shapes by suffix: t is any number of tokens, v is this rank's shard of the vocabulary. Tensors without a
suffix have one number for each token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm.collectives import Group, all_reduce
from tensor_parallel.layers import own_rows


def vocab_parallel_cross_entropy(
    logits_tv: Tensor,
    targets_t: Tensor,
    vocab_size: int | None = None,
    group: Group = None,
    ignore_index: int = -100,
    num_targets: float | None = None,
) -> Tensor:
    """Return the mean over all tokens that are not ignored, as F.cross_entropy does; a scalar, on every rank.

    `vocab_size` is the size of the vocabulary without padding. By default there is no padding. With
    `num_targets` the sum is divided by that number, as in `loss_of` (lab/models/model.py).
    """
    v = logits_tv.shape[-1]
    vocab_size = v * dist.get_world_size(group) if vocab_size is None else vocab_size
    targets_t = targets_t.flatten()
    number = (targets_t != ignore_index).sum() if num_targets is None else num_targets
    return _CrossEntropy.apply(logits_tv.reshape(-1, v), targets_t, vocab_size, group, ignore_index, number)


class _CrossEntropy(Function):
    """Compute the full loss forward, on every rank, and the gradient of this rank's logits backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_tv: Tensor, targets: Tensor, vocab_size: int, group: Group, ignore: int, number: Any
    ) -> Tensor:
        v = logits_tv.shape[-1]
        counts = targets != ignore
        rows, is_own = own_rows(targets.where(counts, 0), v, vocab_size, group)
        values_tv = logits_tv.float() if logits_tv.itemsize < 4 else logits_tv
        if vocab_size < v * dist.get_world_size(group):  # padding has no probability
            entries_v = torch.arange(v, device=rows.device) + dist.get_rank(group) * v
            values_tv = values_tv.masked_fill(entries_v >= vocab_size, -torch.inf)

        # Without the maximum, exp() could overflow. The maximum has to be the same on all ranks.
        largest = values_tv.amax(-1)
        all_reduce(largest, op="max", group=group)

        exps_tv = (values_tv - largest.unsqueeze(-1)).exp_()
        at_target = values_tv.gather(-1, rows.unsqueeze(-1)).squeeze(-1).where(is_own, 0)
        sums = torch.stack([exps_tv.sum(-1), at_target])
        all_reduce(sums, group=group)
        total, at_target = sums

        losses = total.log() + largest - at_target
        ctx.save_for_backward(exps_tv, total, rows, is_own, counts)
        ctx.dtype, ctx.number = logits_tv.dtype, number
        return losses.where(counts, 0).sum() / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # The gradient of a logit is its probability, and 1 less at the target. Nothing has to be sent.
        exps_tv, total, rows, is_own, counts = ctx.saved_tensors
        weight = (grad / ctx.number).where(counts, 0).unsqueeze(-1)
        grad_tv = exps_tv * (weight / total.unsqueeze(-1))
        hits = -weight * is_own.unsqueeze(-1)
        grad_tv.scatter_add_(-1, rows.unsqueeze(-1), hits.to(grad_tv.dtype))
        return grad_tv.to(ctx.dtype), None, None, None, None, None
