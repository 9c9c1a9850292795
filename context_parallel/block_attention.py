"""Attend to some of the keys, and join results over different keys: what ring attention is made of.

A query's attention over all keys is y = sum_j exp(s_j - L) v_j, where s_j is its score for key j, and
L = log sum_j exp(s_j) is the log-sum-exp of the scores. Two sets of keys, A and B, have results of their own,
each normalised by its own L. Knowing both L, the results can be joined, exactly:

      L = log(exp L_A + exp L_B)          y = exp(L_A - L) y_A  +  exp(L_B - L) y_B

The backward needs no joining. With the L of all keys the probabilities of a block are p_j = exp(s_j - L), and
each gradient is a sum over the keys (D below is the same for all of them):

      dv_j = p_j dy      ds_j = p_j (dy . v_j - D)      D = dy . y      dq = sum_j ds_j k_j      dk_j = ds_j q

`Textbook` writes this out. `Fused` calls PyTorch's attention for CPUs, which never stores the scores of all
pairs. Both take `q_bhte`, and keys and values that may have fewer heads: then several query heads share one.

After Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, and Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
"""

from typing import Protocol

import torch
from torch import Tensor

from context_parallel.sequence_cut import Part

NO_KEY = -1e30  # the log-sum-exp of no key; with -inf two of them would be joined to NaN


def join(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of both results, and its log-sum-exp (b, h, t)."""
    joined = torch.logaddexp(lse, other_lse)
    weights = [torch.exp(each - joined).unsqueeze(-1) for each in (lse, other_lse)]
    return weights[0] * y + weights[1] * other_y, joined


class Kernel(Protocol):
    """Describe what computes attention to the keys of one part: Textbook, Fused, or a clock (clock.py)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Textbook:
    """Attention to the keys of one part, in plain tensor operations."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Return `y_bhte` and the log-sum-exp (b, h, t) of each query's scores for these keys."""
        scores = self._scores(q, shared(k, q), part)
        lse = scores.logsumexp(-1).clamp(min=NO_KEY)
        p = torch.exp(scores - lse.unsqueeze(-1)).to(q.dtype)
        return p @ shared(v, q), lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this part's terms of the gradients of q, k and v. `y` and `lse` are those over all keys."""
        p = torch.exp(self._scores(q, shared(k, q), part) - lse.unsqueeze(-1)).to(q.dtype)
        of_scores = p * (dy @ shared(v, q).transpose(-1, -2) - (dy * y).sum(-1, keepdim=True))
        of_scores = of_scores * q.shape[-1] ** -0.5
        dk, dv = of_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
        return of_scores @ shared(k, q), summed_over_shared(dk, k), summed_over_shared(dv, v)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, part: Part) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        # A log-sum-exp in bfloat16 would be off by some percent, and with it all probabilities.
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        mask = part.mask
        if part.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class Fused:
    """Attention to the keys of one part, in one call of PyTorch: blocks of scores stay in the cache."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Return `y_bhte` and the log-sum-exp (b, h, t) of each query's scores for these keys."""
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, shared(k, q), shared(v, q), is_causal=part.is_causal, attn_mask=self._added(part, q)
        )
        if part.mask is not None:  # PyTorch returns 0 for a query without keys
            lse = lse.masked_fill(~part.mask.any(-1), NO_KEY)
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this part's terms of the gradients of q, k and v. `y` and `lse` are those over all keys."""
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, shared(k, q), shared(v, q), y, lse, 0.0, part.is_causal, attn_mask=self._added(part, q)
        )
        return dq, summed_over_shared(dk, k), summed_over_shared(dv, v)

    @staticmethod
    def _added(part: Part, q: Tensor) -> Tensor | None:
        """Return the mask as numbers to be added to the scores."""
        if part.mask is None:
            return None
        return torch.zeros(part.mask.shape, dtype=q.dtype).masked_fill(~part.mask, -torch.inf)


KERNELS: dict[str, Kernel] = {"textbook": Textbook(), "fused": Fused()}


def shared(k: Tensor, q: Tensor) -> Tensor:
    """Return keys or values repeated, so that each query head has its own (grouped-query attention)."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def summed_over_shared(grad: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of `k` from that of `shared(k, q)`."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)
