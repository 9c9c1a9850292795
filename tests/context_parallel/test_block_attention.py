"""Attention to some keys gives results that can be joined, in plain tensor operations and in one call."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from context_parallel.block_attention import KERNELS, NO_KEY, Kernel, join_results
from context_parallel.sequence_cut import AttentionPart
from lab.check import assert_same
from tests.context_parallel.equivalence import qkv
from tests.context_parallel.gpu_kernel import gpu_kernel

QUERIES, KEYS = 5, 7


NAMES = (*KERNELS, "fused on a GPU")


@contextmanager
def kernel_named(name: str) -> Iterator[Kernel]:
    with nullcontext() if name in KERNELS else gpu_kernel():
        yield KERNELS.get(name, KERNELS["fused"])


@pytest.fixture(params=NAMES)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with kernel_named(request.param) as named:
        yield named


def blocks(kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, more keys than queries with their values, and a gradient of the result."""
    q, _, _, dy = qkv(QUERIES)
    _, k, v, _ = qkv(KEYS, kv_heads=kv_heads)
    return q, k, v, dy


def random_mask() -> Tensor:
    """Return a mask under which query 2 of the first sequence has no key."""
    mask = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, :, :, 0] = True
    mask[0, :, 2] = False
    return mask


EVERYTHING = AttentionPart(slice(0, QUERIES), slice(0, KEYS))
MASKED = AttentionPart(slice(0, QUERIES), slice(0, KEYS), mask=random_mask())


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return attention as it is defined, and the log of the sum of exponentials of the scores."""
    groups = q.shape[1] // k.shape[1]
    k, v = (torch.cat([x[:, [h // groups]] for h in range(q.shape[1])], 1) for x in (k, v))
    scores = torch.einsum("bhqe,bhke->bhqk", q, k) / q.shape[-1] ** 0.5
    exps = scores.exp() if mask is None else scores.exp() * mask
    total = exps.sum(-1)
    return exps @ v / total.clamp(min=1e-300).unsqueeze(-1), total.log()


@pytest.mark.parametrize("name", NAMES)
def test_results_over_two_sets_of_keys_are_joined_to_that_over_both(name: str):
    q, k, v, _ = blocks()
    for border in (1, 3, 6):
        parts = [(k[:, :, own], v[:, :, own]) for own in (slice(0, border), slice(border, KEYS))]
        ends = (AttentionPart(slice(0, QUERIES), slice(0, part[0].shape[2])) for part in parts)
        with kernel_named(name) as kernel:
            results = [kernel.attend(q, *part, end) for part, end in zip(parts, ends, strict=True)]
        joined = dict(zip(("y", "lse"), join_results(*results[0], *results[1]), strict=True))
        expected = dict(zip(("y", "lse"), softmax_attention(q, k, v), strict=True))
        assert_same(joined, expected, what=f"joined results of {border} keys and of the others,")


def test_joining_with_the_result_of_no_key_changes_nothing():
    q, k, v, _ = blocks()
    found = KERNELS["textbook"].attend(q, k, v, EVERYTHING)
    nothing = torch.zeros_like(found[0]), torch.full_like(found[1], NO_KEY)
    for y, lse in (join_results(*found, *nothing), join_results(*nothing, *found)):
        assert torch.equal(y, found[0]) and torch.equal(lse, found[1])
    y, lse = join_results(*nothing, *nothing)
    assert not y.any() and torch.isfinite(lse).all()


def test_scores_that_exp_cannot_hold_are_joined():
    far = torch.tensor([[[1000.0]]], dtype=torch.float64)
    ones = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    y, lse = join_results(ones, far, 3 * ones, far)
    assert_same({"y": y, "lse": lse}, {"y": 2 * ones, "lse": far + torch.tensor(2.0).double().log()})


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_to_a_part_and_its_backward_equal_autograd(kernel: Kernel, kv_heads: int):
    for part in (EVERYTHING, MASKED, AttentionPart(slice(0, QUERIES), slice(0, QUERIES), is_causal=True)):
        q, k, v, dy = blocks(kv_heads)
        k, v = k[:, :, part.keys], v[:, :, part.keys]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = torch.ones(QUERIES, QUERIES).tril() if part.is_causal else part.mask
        y, lse = softmax_attention(*leaves, mask)
        y.backward(dy)
        own_y, own_lse = kernel.attend(q, k, v, part)
        expected = {"y": y.detach(), "lse": lse.detach().clamp(min=NO_KEY)}
        has_key = lse.isfinite()
        assert part is MASKED or has_key.all()
        assert torch.equal(own_lse[~has_key], torch.full_like(own_lse[~has_key], NO_KEY))
        assert not own_y[~has_key].any()
        for each in (expected, found := {"y": own_y, "lse": own_lse}):
            each["lse"] = each["lse"].where(has_key, 0)
        # A query without a key in this part has keys in another one: its log-sum-exp over all keys is finite.
        of_all = own_lse.where(has_key, 0)
        gradients = kernel.backward(dy, q, k, v, own_y, of_all, part)
        for name, leaf, gradient in zip(("dq", "dk", "dv"), leaves, gradients, strict=True):
            expected[name], found[name] = leaf.grad, gradient
        assert_same(found, expected, what=f"result of {kernel.attend.__name__} under {part},")


def test_a_kernel_takes_tensors_with_any_strides(kernel: Kernel):
    q, k, v, dy = blocks()
    textbook = KERNELS["textbook"]
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, dy)]
    y, lse = textbook.attend(q, k, v, EVERYTHING)
    names, found = ("y", "lse"), kernel.attend(*turned[:3], EVERYTHING)
    assert_same(dict(zip(names, found, strict=True)), {"y": y, "lse": lse}, what="result")
    one = torch.ones((), dtype=q.dtype).expand(q.shape)  # what the backward of sum() gives
    for own_dy, their_dy in ((turned[3], dy), (one, one)):
        found = kernel.backward(own_dy, *turned[:3], y, lse, EVERYTHING)
        right = textbook.backward(their_dy, q, k, v, y, lse, EVERYTHING)
        names = ("dq", "dk", "dv")
        assert_same(dict(zip(names, found, strict=True)), dict(zip(names, right, strict=True)))
