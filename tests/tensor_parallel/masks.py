"""Replace dropout by one with fixed masks, of which each rank uses the part of its tokens or heads.

A mask is a function of the step and of the number of dropouts before it in the forward. So a plain model and
a tensor parallel model drop the same numbers, on any rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

MOST_TOKENS = 20  # at least as long as the longest text with its padding


class FixedMasks:
    """These masks replace those of torch's dropout and attention; `cut` says which part this rank has."""

    def __init__(self) -> None:
        self._cut, self._step, self._calls = "", 0, 0

    @contextmanager
    def forward(self, step: int, cut: str) -> Iterator[None]:
        """Use masks in a forward; `cut`: "" plain, "heads" tensor parallel, "tokens" sequence parallel."""
        self._cut, self._step, self._calls = cut, step, 0
        with (
            mock.patch.object(F, "dropout", self._dropout),
            mock.patch.object(F, "scaled_dot_product_attention", self._attention),
        ):
            yield

    def _mask(self, probability: float, *shape: int) -> Tensor:
        self._calls += 1
        random = torch.Generator().manual_seed(1000 * self._step + self._calls)
        return (torch.rand(shape, generator=random) >= probability) / (1 - probability)

    def _dropout(self, x_btd: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert training and not inplace
        batch, time, width = x_btd.shape
        first = dist.get_rank() * time if self._cut == "tokens" else 0
        return x_btd * self._mask(p, batch, MOST_TOKENS, width)[:, first : first + time]

    def _attention(
        self,
        q_bhte: Tensor,
        k_bhte: Tensor,
        v_bhte: Tensor,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Tensor:
        assert is_causal and enable_gqa == (q_bhte.shape[1] != k_bhte.shape[1])
        batch, heads, time, width = q_bhte.shape
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if self._cut else (1, 0)
        mask = self._mask(dropout_p, batch, heads * ranks, MOST_TOKENS, MOST_TOKENS)
        mask = mask[:, rank * heads : (rank + 1) * heads, :time, :time]
        k_bhte, v_bhte = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k_bhte, v_bhte))
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        scores = (q_bhte @ k_bhte.mT / width**0.5).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) * mask) @ v_bhte


class NoMasks:
    """The same interface for models without dropout."""

    def forward(self, step: int, cut: str) -> nullcontext:
        return nullcontext()
