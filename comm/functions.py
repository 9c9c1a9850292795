"""Let autograd differentiate collectives: one collective runs forward, its conjugate backward.

      forward    x on the root        ──broadcast──►  a copy on each rank      ──►  a term of the loss
      backward   the gradient of x    ◄────sum──────  the copies' gradients    ◄──  on each rank

A collective is a linear function of the tensors of all ranks together. If every rank computes a term of the
loss, the backward of a collective is the transposed function, its conjugate. In the picture a broadcast makes
n copies, so the gradient of x is the sum of n gradients.

    function             forward         backward        in Megatron-LM
    broadcast_from_root  broadcast       reduce
    sum_to_root          reduce          broadcast
    scatter_from_root    scatter         gather
    gather_to_root       gather          scatter
    gather_tokens        all-gather      reduce-scatter  g: gather_from_sequence_parallel_region
    scatter_sums         reduce-scatter  all-gather      g-bar: reduce_scatter_to_sequence_parallel_region
    sum_to_each_rank     all-reduce      all-reduce
    exchange_shards      all-to-all      all-to-all      all_to_all

If all ranks compute the same loss from the output, that loss counts once. Then the gradient of the output is
complete on every rank, and a sum over ranks would make it n times too large:

    sum_over_ranks       all-reduce      identity        g: reduce_from_tensor_model_parallel_region
    gather_from_ranks    all-gather      own shard       gather_from_tensor_model_parallel_region

If all ranks have the same input and compute different things from it, each has one term of its gradient:

    copy_to_ranks        identity        all-reduce      f: copy_to_tensor_model_parallel_region
    split_to_ranks       own shard       all-gather      scatter_to_tensor_model_parallel_region

The tables agree. sum_to_each_rank is sum_over_ranks and then copy_to_ranks. gather_tokens is
gather_from_ranks and then copy_to_ranks. scatter_sums is sum_over_ranks and then split_to_ranks. A reduction
is always a sum.

A backward communicates too: every rank must call it, and every rank's input must require a gradient. A tensor
is split along a dim as torch.tensor_split does it. `gather_from_ranks`, `split_to_ranks` and, with sizes,
`exchange_shards` allow shards of different sizes; the other functions refuse them. No function writes into a
tensor that autograd may still need.

Sources: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053 (f and g); Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, https://arxiv.org/abs/2205.05198 (which
calls them f and f-bar, and adds the g and g-bar of sequence parallelism).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm import collectives
from comm.collectives import Group, Work, chosen_pattern
from comm.errors import CommError
from comm.shards import shard_sizes


class _Pair(Function):
    """Apply `forward` to the input, and `backward` to the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_function = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_function(grad), None, None


def broadcast_from_root(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Broadcast forward, reduce backward. Other ranks give only the shape of `x`, whose gradient is zero."""
    return _Pair.apply(x, lambda x: _broadcast(x, root, group), lambda grad: _reduce(grad, root, group))


def sum_to_root(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Reduce forward, broadcast backward. The other ranks get zeros, whose gradient is ignored."""
    return _Pair.apply(x, lambda x: _reduce(x, root, group), lambda grad: _broadcast(grad, root, group))


def scatter_from_root(x: Tensor, dim: int, root: int = 0, group: Group = None) -> Tensor:
    """Scatter along `dim` forward, gather backward. Only the shape of the other ranks' `x` counts."""
    return _Pair.apply(
        x, lambda x: _scatter(x, dim, root, group), lambda grad: _gather(grad, dim, root, group)
    )


def gather_to_root(x: Tensor, dim: int, root: int = 0, group: Group = None) -> Tensor:
    """Gather along `dim` forward, scatter backward. The other ranks get zeros, whose gradient is ignored."""
    return _Pair.apply(
        x, lambda x: _gather(x, dim, root, group), lambda grad: _scatter(grad, dim, root, group)
    )


def gather_tokens(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward (g of sequence parallelism)."""
    return _Pair.apply(
        x,
        lambda x: InFlightAllGather(x, dim, group).wait(),
        lambda grad: InFlightReduceScatter(grad, dim, group).wait(),
    )


def scatter_sums(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward (g-bar of sequence parallelism)."""
    return _Pair.apply(
        x,
        lambda x: InFlightReduceScatter(x, dim, group).wait(),
        lambda grad: InFlightAllGather(grad, dim, group).wait(),
    )


def sum_to_each_rank(x: Tensor, group: Group = None) -> Tensor:
    """All-reduce forward, all-reduce backward: each rank uses the sum in a different computation."""
    return _Pair.apply(x, lambda x: summed(x, group), lambda grad: summed(grad, group))


def exchange_shards(
    x: Tensor,
    dim: int,
    group: Group = None,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """All-to-all along `dim` forward, all-to-all backward: shard p of `x` goes to rank p.

    Return the shards that this rank receives, in rank order along `dim`. `sent[p]` is the size along `dim` of
    the shard that goes to rank p, `received[p]` that of the shard from rank p. Without `sent` all shards have
    the same size, and without `received` it equals `sent`.
    """
    sent = _equal_shards(x.shape[dim], dim, group) if sent is None else sent
    received = sent if received is None else received
    return _Pair.apply(
        x,
        lambda x: _exchange(x, dim, group, sent, received),
        lambda grad: _exchange(grad, dim, group, received, sent),
    )


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """All-reduce forward, identity backward (g in Megatron-LM)."""
    return _Pair.apply(x, lambda x: summed(x, group), lambda grad: grad)


def gather_from_ranks(x: Tensor, dim: int, group: Group = None, size: int | None = None) -> Tensor:
    """All-gather along `dim` forward, own shard backward. If shards differ, `size` is the full size."""
    return _Pair.apply(
        x, lambda x: InFlightAllGather(x, dim, group, size).wait(), lambda grad: own_shard(grad, dim, group)
    )


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Identity forward, all-reduce backward (f in Megatron-LM)."""
    return _Pair.apply(x, lambda x: x.view_as(x), lambda grad: summed(grad, group))


def split_to_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Keep this rank's shard along `dim` forward, all-gather backward."""
    size = x.shape[dim]
    return _Pair.apply(
        x,
        lambda x: own_shard(x, dim, group).clone(),
        lambda grad: InFlightAllGather(grad, dim, group, size).wait(),
    )


# The functions below call those of comm.collectives, but return a new tensor and work along any dim. A tensor
# on device "meta" has a shape and no memory: a pipeline runs on them to learn shapes, and sends nothing.


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks."""
    total = x.contiguous().clone()
    if not x.is_meta:
        collectives.all_reduce(total, group=group, pattern=chosen_pattern("all_reduce", group))
    return total


def own_shard(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's shard of `x` along `dim`, as a view."""
    return x.split(shard_sizes(x.shape[dim], dist.get_world_size(group)), dim)[dist.get_rank(group)]


class InFlightAllGather:
    """An all-gather along `dim`. The constructor starts it, and `wait` returns the full tensor."""

    def __init__(self, shard: Tensor, dim: int, group: Group, size: int | None = None) -> None:
        ranks = dist.get_world_size(group)
        size = shard.shape[dim] * ranks if size is None else size
        self._dim, self._sizes = dim, shard_sizes(size, ranks)
        own = self._sizes[dist.get_rank(group)]
        if own != shard.shape[dim]:
            raise CommError(
                f"The shard of rank {dist.get_rank()} has size {shard.shape[dim]} along dim {dim}, "
                f"but its part of {size} has size {own} (see comm.shards.shard_sizes)."
            )
        # An all-gather puts shards one behind the other, so `dim` becomes the first dim. All shards are
        # padded to the longest.
        rows = shard.movedim(dim, 0)
        if shard.shape[dim] < self._sizes[0]:
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        rows = rows.contiguous()
        self._full = rows.new_empty(self._sizes[0] * ranks, *rows.shape[1:])
        self._work: Work | None = None
        if not rows.is_meta:
            pattern = chosen_pattern("all_gather", group)
            self._work = collectives.all_gather(self._full, rows, group, async_op=True, pattern=pattern)

    def wait(self) -> Tensor:
        """Wait until the all-gather has ended, and return the full tensor."""
        if self._work is not None:
            self._work.wait()
        if len(set(self._sizes)) > 1:
            padded = self._full.split(self._sizes[0])
            self._full = torch.cat([shard[:size] for shard, size in zip(padded, self._sizes, strict=True)])
        return self._full.movedim(0, self._dim)


class InFlightReduceScatter:
    """A reduce-scatter along `dim`. The constructor starts it, and `wait` returns the shard."""

    def __init__(self, full: Tensor, dim: int, group: Group) -> None:
        size, *_ = _equal_shards(full.shape[dim], dim, group)
        # This tensor is kept, because the reduce-scatter reads it until the end.
        self._rows = full.movedim(dim, 0).contiguous()
        self._dim, self._shard = dim, self._rows.new_empty(size, *self._rows.shape[1:])
        self._work: Work | None = None
        if not full.is_meta:
            pattern = chosen_pattern("reduce_scatter", group)
            self._work = collectives.reduce_scatter(
                self._shard, self._rows, group=group, async_op=True, pattern=pattern
            )

    def wait(self) -> Tensor:
        """Wait until the reduce-scatter has ended, and return this rank's shard of the sum."""
        if self._work is not None:
            self._work.wait()
        return self._shard.movedim(0, self._dim)


def _broadcast(x: Tensor, root: int, group: Group) -> Tensor:
    copy = x.contiguous().clone()
    collectives.broadcast(copy, root, group, pattern=chosen_pattern("broadcast", group))
    return copy


def _reduce(x: Tensor, root: int, group: Group) -> Tensor:
    total = x.contiguous().clone()
    collectives.reduce(total, root=root, group=group, pattern=chosen_pattern("reduce", group))
    return total if dist.get_rank(group) == root else total.zero_()


def _scatter(full: Tensor, dim: int, root: int, group: Group) -> Tensor:
    size, *_ = _equal_shards(full.shape[dim], dim, group)
    rows = full.movedim(dim, 0).contiguous()
    shard = rows.new_empty(size, *rows.shape[1:])
    collectives.scatter(shard, rows, root, group, pattern=chosen_pattern("scatter", group))
    return shard.movedim(0, dim)


def _gather(shard: Tensor, dim: int, root: int, group: Group) -> Tensor:
    rows = shard.movedim(dim, 0).contiguous()
    full = rows.new_zeros(len(rows) * dist.get_world_size(group), *rows.shape[1:])
    collectives.gather(rows, full, root, group, pattern=chosen_pattern("gather", group))
    return full.movedim(0, dim)


def _exchange(x: Tensor, dim: int, group: Group, sent: list[int], received: list[int]) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    width = math.prod(rows.shape[1:])
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    sizes = [size * width for size in received], [size * width for size in sent]
    collectives.all_to_all(arrived, rows, *sizes, group=group, pattern=chosen_pattern("all_to_all", group))
    return arrived.movedim(0, dim)


def _equal_shards(size: int, dim: int, group: Group) -> list[int]:
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise CommError(f"a size of {size} along dim {dim} cannot be divided equally among {ranks} ranks.")
    return [size // ranks] * ranks
