"""Compare context parallel attention, and models that use it, with one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from context_parallel.block_attention import KERNELS, Kernel
from context_parallel.parallel_model import AttentionFunction, ContextParallel, Cut, SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig


@dataclass(frozen=True)
class Variant:
    """Hold one way to compute attention of a sequence that is cut among ranks."""

    is_ring: bool
    cut: Cut
    kernel: Kernel = KERNELS["fused"]

    @property
    def attention(self) -> AttentionFunction:
        return ring_attention if self.is_ring else all_to_all_attention  # a learner's may stand there

    def __str__(self) -> str:
        return f"{self.attention.__name__}, {self.cut.__name__}, {self.kernel.attend.__name__}"

    def wrap(self, model: GPT) -> ContextParallel:
        return ContextParallel(model, self.attention, self.cut, self.kernel)


RING = Variant(True, SequenceCut.zigzag)
CONTIGUOUS_RING = Variant(True, SequenceCut.contiguous)
TEXTBOOK_RING = Variant(True, SequenceCut.zigzag, KERNELS["textbook"])
ALL_TO_ALL = Variant(False, SequenceCut.contiguous)
VARIANTS = (RING, TEXTBOOK_RING, CONTIGUOUS_RING, ALL_TO_ALL)


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """Make a GPT whose 12 heads 1 to 4 ranks divide."""
    sizes = {"vocab_size": 61, "block_size": 24, "num_layers": 2, "num_heads": 12, "width": 24}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def text(length: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Return two rows of tokens, and as their targets the tokens that follow."""
    tokens = torch.randint(61, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def documents_with_borders(length: int, *borders: Sequence[int]) -> Tensor:
    """Return the number of each token's document, where row i has a new document at each of `borders[i]`."""
    positions = torch.arange(length)
    return torch.stack([torch.bucketize(positions, torch.tensor(row).long(), right=True) for row in borders])


def attending_pairs(length: int, is_causal: bool = True, documents: Tensor | None = None) -> Tensor:
    """Return which pairs of a query and a key attend, (batch or 1, time, time), by their positions alone."""
    position = torch.arange(length)
    later = position[None, None, :] > position[None, :, None]
    pairs = ~later if is_causal else torch.ones_like(later)
    return pairs if documents is None else pairs & (documents[:, :, None] == documents[:, None, :])


def qkv(length: int, heads: int = 4, kv_heads: int | None = None, width: int = 3) -> list[Tensor]:
    """Return full q, k and v, and a gradient of the result, for two sequences; a head has `width` numbers."""
    random = torch.Generator().manual_seed(length)
    shapes = [(2, h, length, width) for h in (heads, kv_heads or heads, kv_heads or heads, heads)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def compare_attention(
    cluster: Cluster,
    variant: Variant,
    length: int,
    documents: Tensor | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    width: int = 3,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
) -> None:
    """Compare the attention of this rank's tokens, and its gradients, with one process (in float64)."""
    *full, dy = (x.to(dtype).double() for x in qkv(length, heads, kv_heads, width))
    pairs = attending_pairs(length, documents=documents).unsqueeze(1)
    cut = variant.cut(length, cluster.world_size)
    on_device = None if documents is None else documents.to(cluster.device)
    sequence = SharedSequence(None, cut, variant.kernel, on_device)
    own = lambda x: cut.own(x, cluster.rank, 2)  # noqa: E731
    here = lambda x: own(x).to(cluster.device, dtype)  # noqa: E731

    results = []
    attend: Callable[..., Tensor]
    for attend, leaves, gradient in (
        (lambda q, k, v: variant.attention(q, k, v, sequence, 0.0), [here(x) for x in full], here(dy)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, pairs, enable_gqa=True), full, dy),
    ):
        leaves = [x.clone().requires_grad_() for x in leaves]
        y = attend(*leaves)
        y.backward(gradient)
        named = dict(zip(("dq", "dk", "dv"), (leaf.grad for leaf in leaves), strict=True))
        results.append({"y": y.detach()} | named)
    actual, expected = results
    what = f"{variant}, {length} tokens, {documents}, {cluster.world_size} ranks"
    assert_same(actual, {name: own(x) for name, x in expected.items()}, rtol, what=f"result of {what},")
