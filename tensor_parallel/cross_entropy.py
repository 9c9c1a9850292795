"""Cross entropy of logits that no rank has whole: three small reductions instead of one large gather.

      rank 0   logits of words 0..v/n       max ─┐                  sum of exp ─┐
      rank 1   logits of the next ones      max ─┴─ max over ranks  sum of exp ─┴─ sum over ranks ─► loss
                                                                    target's   ─┘

The whole logits are by far the largest activation of a model with a large vocabulary, n times what a rank
has here. What is sent is three numbers for each token. After Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, section 3.

Shapes: `logits_tw`, tokens in any dims and this rank's words; everything else has a number for each token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm.collectives import Group, all_reduce, fastest_pattern
from tensor_parallel.layers import local_words


def vocab_parallel_cross_entropy(
    logits_tw: Tensor,
    targets_t: Tensor,
    num_words: int | None = None,
    group: Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean over the tokens not ignored, as F.cross_entropy on the whole logits; a scalar, on every rank.

    `num_words` is the size of the vocabulary without padding; by default nothing is padded. IndexError for a
    target outside of it.
    """
    words = logits_tw.shape[-1]
    num_words = words * dist.get_world_size(group) if num_words is None else num_words
    return _CrossEntropy.apply(
        logits_tw.reshape(-1, words), targets_t.reshape(-1), num_words, group, ignore_index, label_smoothing
    )


class _CrossEntropy(Function):
    """The whole loss forward, on every rank; the gradient of this rank's words backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, num_words: int, group: Group, ignore: int, smoothing: float
    ) -> Tensor:
        words, pattern = logits.shape[-1], fastest_pattern("all_reduce", group)
        counted = targets != ignore
        mine, is_mine = local_words(targets.where(counted, 0), words, num_words, group, "target")
        real = min(words, max(0, num_words - dist.get_rank(group) * words))  # the rest is padding
        values = logits[:, :real].float() if logits.itemsize < 4 else logits[:, :real]
        largest = values.new_full((len(targets),), -torch.inf) if real == 0 else values.amax(-1)
        all_reduce(largest, op="max", group=group, pattern=pattern)

        exps = (values - largest.unsqueeze(-1)).exp_()
        at_target = torch.zeros_like(largest)
        if real:
            at_target = values.gather(-1, mine.unsqueeze(-1)).squeeze(-1).where(is_mine, at_target)
        sums = torch.stack(
            [exps.sum(-1), at_target, values.sum(-1) if smoothing else torch.zeros_like(largest)]
        )
        all_reduce(sums, group=group, pattern=pattern)
        total, at_target, everything = sums

        losses = total.log() + largest - (1 - smoothing) * at_target - smoothing / num_words * everything
        ctx.save_for_backward(exps, total, mine, is_mine, counted)
        ctx.smoothing, ctx.num_words, ctx.words, ctx.dtype = smoothing, num_words, words, logits.dtype
        return losses.where(counted, 0).sum() / counted.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        exps, total, mine, is_mine, counted = ctx.saved_tensors
        each = (grad / counted.sum()).where(counted, 0).unsqueeze(-1)
        result = exps * (each / total.unsqueeze(-1))
        if ctx.smoothing:
            result -= each * (ctx.smoothing / ctx.num_words)
        if result.shape[-1]:
            hits = -(1 - ctx.smoothing) * each * is_mine.unsqueeze(-1)
            result.scatter_add_(-1, mine.unsqueeze(-1), hits.to(result.dtype))
        if result.shape[-1] < ctx.words:
            result = torch.nn.functional.pad(result, (0, ctx.words - result.shape[-1]))
        return result.to(ctx.dtype), None, None, None, None, None
