"""The conjugate pairs of tensor parallelism: what one does in the forward, the other does in the backward.

      function           forward                            backward                      in Megatron-LM
      copy_to_ranks      identity                           all-reduce                    f
      sum_over_ranks     all-reduce                         identity                      g
      gather             all-gather along a dim             its own part
      split              its own part along a dim           all-gather
      gather_tokens      all-gather along a dim             reduce-scatter                g-bar's conjugate
      scatter_sums       reduce-scatter along a dim         all-gather                    g-bar

A rank's part along a dim is as torch.tensor_split cuts it, but `gather_tokens` and `scatter_sums` want equal
parts. Between `copy_to_ranks` and `sum_over_ranks` each rank computes something else from the same input: its
gradient of the input is one of n terms of a sum. After `sum_over_ranks` all compute the same, and every
rank has the whole gradient already: to reduce it again would make it n times too large.

No collective writes into a tensor that autograd may still need. After Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, and Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, https://arxiv.org/abs/2205.05198.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm.collectives import Group, Work, all_gather, all_reduce, fastest_pattern, reduce_scatter
from comm.errors import CommError
from comm.shards import shard_sizes


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Identity forward, all-reduce backward (f in Megatron-LM)."""
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """All-reduce forward, identity backward (g in Megatron-LM)."""
    return _SumOverRanks.apply(x, group)


def gather(x: Tensor, dim: int, group: Group = None, size: int | None = None) -> Tensor:
    """All-gather along `dim` forward, this rank's part backward. `size`: of the whole, if parts differ."""
    return _Gather.apply(x, dim, group, size)


def split(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's part along `dim` forward, all-gather backward."""
    return _Split.apply(x, dim, group)


def gather_tokens(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward."""
    return _GatherTokens.apply(x, dim, group)


def scatter_sums(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward."""
    return _ScatterSums.apply(x, dim, group)


def summed(x: Tensor, group: Group) -> Tensor:
    """A new tensor: the sum over ranks."""
    total = x.contiguous().clone()
    all_reduce(total, group=group, pattern=fastest_pattern("all_reduce", group))
    return total


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of `x` along `dim`."""
    return x.split(shard_sizes(x.shape[dim], dist.get_world_size(group)), dim)[dist.get_rank(group)]


class Gathering:
    """All ranks' parts along `dim`, on their way from the start."""

    def __init__(self, part: Tensor, dim: int, group: Group, size: int | None = None) -> None:
        ranks = dist.get_world_size(group)
        size = part.shape[dim] * ranks if size is None else size
        self._dim, self._sizes = dim, shard_sizes(size, ranks)
        if self._sizes[dist.get_rank(group)] != part.shape[dim]:
            raise CommError(f"rank {dist.get_rank()} has {part.shape[dim]} of {size} along dim {dim}.")
        # Parts along the first dim lie one behind the other, as they travel; all as long as the longest.
        first = part.movedim(dim, 0)
        if part.shape[dim] < self._sizes[0]:
            first = torch.cat([first, first.new_zeros(1, *first.shape[1:])])
        first = first.contiguous()
        self._full = first.new_empty(self._sizes[0] * ranks, *first.shape[1:])
        self._work: Work = all_gather(
            self._full, first, group=group, async_op=True, pattern=fastest_pattern("all_gather", group)
        )

    def wait(self) -> Tensor:
        """The whole."""
        self._work.wait()
        if len(set(self._sizes)) > 1:
            padded = self._full.split(self._sizes[0])
            self._full = torch.cat([part[:size] for part, size in zip(padded, self._sizes, strict=True)])
        return self._full.movedim(0, self._dim)


class Scattering:
    """The sum over ranks, cut along `dim`, on its way from the start."""

    def __init__(self, full: Tensor, dim: int, group: Group) -> None:
        ranks = dist.get_world_size(group)
        if full.shape[dim] % ranks:
            raise CommError(f"{full.shape[dim]} along dim {dim} cannot be divided among {ranks} ranks.")
        first = full.movedim(dim, 0).contiguous()
        self._dim, self._part = dim, first.new_empty(first.shape[0] // ranks, *first.shape[1:])
        self._first = first
        self._work: Work = reduce_scatter(
            self._part, first, group=group, async_op=True, pattern=fastest_pattern("reduce_scatter", group)
        )

    def wait(self) -> Tensor:
        """This rank's part."""
        self._work.wait()
        return self._part.movedim(0, self._dim)


class _CopyToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, size: int | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return Gathering(x, dim, group, size).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(grad, ctx.dim, ctx.group), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        return own_part(x, dim, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Gathering(grad, ctx.dim, ctx.group, ctx.size).wait(), None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return Gathering(x, dim, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Scattering(grad, ctx.dim, ctx.group).wait(), None, None


class _ScatterSums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return Scattering(x, dim, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Gathering(grad, ctx.dim, ctx.group).wait(), None, None
