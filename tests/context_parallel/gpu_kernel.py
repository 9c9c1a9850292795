"""Stand for PyTorch's memory-efficient attention for GPUs: it refuses and misreads what that one does.

The rules are those of PyTorch's aten/src/ATen/native/transformers/cuda: attention_backward.cu, and below
mem_eff_attention `check_supported` in kernel_forward.h and kernel_backward.h. Shapes and strides of results
are compared with PyTorch's own predictions (its functions for the device "meta"). Values are the textbook's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from context_parallel import block_attention
from context_parallel.block_attention import attend, attend_backward
from context_parallel.sequence_cut import AttentionPart

NAME = "_scaled_dot_product_efficient_attention"


@contextmanager
def gpu_kernel(dispatch_key: str = "CPU") -> Iterator[None]:
    """Let the fused attention take the path of a GPU, with this kernel, and see that it does."""
    library, calls = torch.library.Library("aten", "IMPL"), []

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        calls.append("forward")
        part = part_of(q, k, v, bias, is_causal)
        y, lse = attend(q, k, v, part)
        if part.mask is not None:  # some versions return NaN for a query without keys
            has_key = part.mask.any(-1)
            y, lse = y.where(has_key.unsqueeze(-1), torch.nan), lse.where(has_key, 0.0)
        padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.inf)
        padded[..., : lse.shape[2]] = lse
        given = (q, k, v, bias, compute_log_sumexp, dropout_p, is_causal)
        y, padded = as_predicted("", (by_time(y), padded), given)
        seed = torch.zeros((), dtype=torch.int64)
        return y, padded, seed, seed

    def backward(
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        y: Tensor,
        lse: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        dropout_p: float,
        grad_input_mask: Sequence[bool],
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        calls.append("backward")
        assert dropout_p == 0.0 and not grad_input_mask[3]
        assert dy.dtype == y.dtype == q.dtype and lse.dtype == torch.promote_types(q.dtype, torch.float32)
        assert lse.shape[2] == -(-q.shape[2] // 32) * 32 and all(step % 8 == 0 for step in lse.stride()[:2])
        assert lse.stride(2) == 1 and (lse[..., q.shape[2] :] == torch.inf).all()
        # The kernel knows no stride of the result from one query to the next.
        y = y.as_strided(y.shape, (y.stride(0), y.stride(1), y.shape[1] * y.shape[3], 1))
        part = part_of(q, k, v, bias, is_causal)
        gradients = attend_backward(dy, q, k, v, y, lse[..., : q.shape[2]], part)
        given = (dy, q, k, v, bias, y, lse, philox_seed, philox_offset, 0.0, grad_input_mask, is_causal)
        dq, dk, dv = as_predicted("_backward", [by_time(each) for each in gradients], given)
        return dq, dk, dv, None

    library.impl(NAME, forward, dispatch_key)
    library.impl(f"{NAME}_backward", backward, dispatch_key)
    try:
        with mock.patch.object(block_attention, "can_use_efficient_attention", lambda params: True):
            yield
    finally:
        library._destroy()
    assert calls


def part_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> AttentionPart:
    """Return the part of the attention that was asked for, if the kernel takes these tensors."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    assert k.shape == v.shape == (batch, heads, keys, width) and k.dtype == v.dtype == q.dtype
    for x in (q, k, v):  # heads are as wide as aligned memory, or a multiple of it
        assert x.stride(3) == 1 and all(step % width == 0 for step in (*x.stride()[:3], x.storage_offset()))
    if bias is not None:
        assert not is_causal and bias.dtype == q.dtype and bias.shape == (batch, heads, queries, keys)
        assert bias.stride(3) == 1 and all(step % 16 == 0 for step in bias.stride()[:3])
    return AttentionPart(slice(0, queries), slice(0, keys), is_causal, None if bias is None else bias == 0)


def by_time(x: Tensor) -> Tensor:
    """Return the tensor (b, h, t, e), lying in memory as (b, t, h, e)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_predicted(suffix: str, results: Sequence[Tensor], given: Sequence[object]) -> Sequence[Tensor]:
    """Return the results, if they have the shapes and strides that PyTorch predicts from the arguments."""
    on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
    predicted = getattr(torch.ops.aten, NAME + suffix)(*on_meta)
    for result, like in zip(results, predicted, strict=False):
        assert (result.shape, steps(result)) == (like.shape, steps(like))
    return results


def steps(x: Tensor) -> list[int]:
    """Return the strides of the dims that have more than one entry."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
