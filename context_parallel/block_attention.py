"""Attend to some of the keys, and join results over different keys: what ring attention is made of.

A query's attention over all keys is y = sum_j exp(s_j - L) v_j, where s_j is its score for key j, and
L = log sum_j exp(s_j) is the log-sum-exp of the scores. Two sets of keys, A and B, have results of their own,
each normalised by its own L. Knowing both L, the results can be joined, exactly:

      L = log(exp L_A + exp L_B)          y = exp(L_A - L) y_A  +  exp(L_B - L) y_B

The backward needs no joining. With the L of all keys the probabilities of a block are p_j = exp(s_j - L). For
one query q, whose scores are s_j = q . k_j / sqrt(e) with heads of width e:

      dv_j = p_j dy        ds_j = p_j (dy . v_j - D) / sqrt(e)        D = dy . y, over all keys
      dk_j = ds_j q        dq = sum_j ds_j k_j

So dq is a sum over the keys, and each block adds its terms. dk_j and dv_j are sums over the queries.

`attend` and `attend_backward` write this out. `fused_attend` and its backward call PyTorch's attention for
CPUs or NVIDIA GPUs, which never stores the scores of all pairs. Where PyTorch has no such kernel, on a GPU in
float64 or for some widths of a head and on other devices, they do what the textbook does. All take `q_bhte`,
and keys and values that may have fewer heads: then several query heads share one.

Shapes by suffix: b batch, h heads, t tokens, e width of a head.

After Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, and Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention

from context_parallel.sequence_cut import AttentionPart
from lab.trace.observer import observe_calls

NO_KEY = -1e30  # the log-sum-exp of no key; with -inf two of them would be joined to NaN


def join_results(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of both results, and its log-sum-exp (b, h, t)."""
    joined = torch.logaddexp(lse, other_lse)
    weights = [torch.exp(each - joined).unsqueeze(-1) for each in (lse, other_lse)]
    return weights[0] * y + weights[1] * other_y, joined


def attend(q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
    """Return `y_bhte` and the log-sum-exp (b, h, t) of each query's scores for these keys."""
    scores = _scores(q, repeat_heads(k, q), part)
    lse = scores.logsumexp(-1).clamp(min=NO_KEY)
    p = torch.exp(scores - lse.unsqueeze(-1)).to(q.dtype)
    return p @ repeat_heads(v, q), lse


def attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: AttentionPart
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's terms of the gradients of q, k and v. `y` and `lse` are those over all keys."""
    p = torch.exp(_scores(q, repeat_heads(k, q), part) - lse.unsqueeze(-1)).to(q.dtype)
    ds = p * (dy @ repeat_heads(v, q).transpose(-1, -2) - (dy * y).sum(-1, keepdim=True))
    ds = ds * q.shape[-1] ** -0.5
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
    return ds @ repeat_heads(k, q), sum_repeated(dk, k), sum_repeated(dv, v)


def _scores(q: Tensor, k: Tensor, part: AttentionPart) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    # A log-sum-exp in bfloat16 would be off by some percent, and with it all probabilities.
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    mask = part.mask
    if part.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def fused_attend(q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
    """Do what `attend` does in one call of PyTorch: blocks of scores stay in the cache."""
    q, k, v = _rows(q, repeat_heads(k, q), repeat_heads(v, q))
    if _has_gpu_kernel(q, k, v):
        y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _added(part, q), compute_log_sumexp=True, is_causal=part.is_causal
        )
        lse = lse[..., : q.shape[2]]  # PyTorch appends numbers, up to a multiple of 32
    elif q.device.type == "cpu":
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=part.is_causal, attn_mask=_added(part, q)
        )
    else:
        return attend(q, k, v, part)
    if part.mask is not None:  # what PyTorch returns for a query without keys depends on the kernel
        has_key = part.mask.any(-1)
        y, lse = y.where(has_key.unsqueeze(-1), 0), lse.where(has_key, NO_KEY)
    return y, lse


def fused_attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: AttentionPart
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `attend_backward` does in one call of PyTorch."""
    dy, q, y, *kv = _rows(dy, q, y, repeat_heads(k, q), repeat_heads(v, q))
    if _has_gpu_kernel(q, *kv):
        # This kernel reads `y` as if it lay in memory as (b, t, h, e), and log-sum-exps in blocks of 32.
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
        mask, unused = _added(part, q), q.new_empty((), dtype=torch.int64)  # a seed, but there is no dropout
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dy, q, *kv, mask, y, lse, unused, unused, 0.0, [True, True, True, False], part.is_causal
        )
    elif q.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, *kv, y, lse, 0.0, part.is_causal, attn_mask=_added(part, q)
        )
    else:
        return attend_backward(dy, q, k, v, y, lse, part)
    return dq, sum_repeated(dk, k), sum_repeated(dv, v)


def _has_gpu_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch's memory-efficient attention for NVIDIA GPUs takes these tensors."""
    params = SDPAParams(q, k, v, None, 0.0, False, False)  # no mask, no dropout, not causal, no shared heads
    return torch.version.hip is None and can_use_efficient_attention(params)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the numbers of a head side by side, which PyTorch's kernels do not check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _added(part: AttentionPart, q: Tensor) -> Tensor | None:
    """Return the mask as numbers to be added to the scores, for each head."""
    if part.mask is None:
        return None
    mask = F.pad(part.mask, (0, -part.mask.shape[-1] % 16))  # on a GPU rows begin at multiples of 16
    added = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    return added[..., : part.mask.shape[-1]].expand(*q.shape[:2], -1, -1)


class Kernel(NamedTuple):
    """Holds the two functions that compute attention to the keys of a part."""

    attend: Callable[[Tensor, Tensor, Tensor, AttentionPart], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionPart], tuple[Tensor, Tensor, Tensor]
    ]

    def drawn(self) -> "Kernel":
        """Return the same functions, whose calls show in the timeline."""
        return Kernel(
            observe_calls(self.attend, "attention", "forward"),
            observe_calls(self.backward, "attention", "backward"),
        )


KERNELS = {
    "textbook": Kernel(attend, attend_backward).drawn(),
    "fused": Kernel(fused_attend, fused_attend_backward).drawn(),
}


def repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    """Return keys or values repeated, so that each query head has its own (grouped-query attention)."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def sum_repeated(grad: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of `k` from that of `repeat_heads(k, q)`."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)
