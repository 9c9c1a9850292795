"""Layers cut among ranks: by columns, by rows, by words.

      x ──► column parallel ──► each rank some of the outputs ──► row parallel ──► sum over ranks ──► y
            W = [W0 | W1]       act(x W0)   act(x W1)             W = [W0]
                                                                      [W1]

A column layer needs the whole input and makes a part of the output; a row layer needs a part of the input
and makes one term of the output. One behind the other they need a single all-reduce forward and one
backward: what comes between them (a GELU, the heads of attention) works on each part alone.

With `sequence_parallel`, what lies outside of such a pair is cut by tokens: the column layer gathers its
input's tokens, and the row layer scatters the sums (functions.py): as many bytes, fewer activations.

A column layer's backward has two products. The input's gradient comes first, and is reduced while the
weight's is computed. After Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, section 3,
and Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 4.2.

Shapes by suffix: b batch, t time, i inputs, o outputs; `_or` an n-th of the outputs, a rank's.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from comm.collectives import Group, all_reduce, fastest_pattern
from comm.functions import (
    InFlightAllGather,
    InFlightReduceScatter,
    gather_from_ranks,
    own_shard,
    scatter_sums,
    split_to_ranks,
    sum_over_ranks,
)
from lab.errors import WorkbookError
from lab.model import seeded

TIME = 1  # the dim that sequence parallel cuts: x is (batch, time, width)


class ColumnParallelLinear(nn.Module):
    """(..., i) to (..., o/n): this rank's outputs, or with `gather_output` all. The input is whole.

    With `sequence_parallel` the input is this rank's tokens along dim 1. Weights are drawn as nn.Linear's
    are, from `seed`, the same whole ones on any number of ranks. WorkbookError if n does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_unless_divided("outputs", out_features, group)
        self.group, self.sequence_parallel, self.gather_output = group, sequence_parallel, gather_output
        whole = _linear(in_features, out_features, bias, seed)
        self.weight = nn.Parameter(own_shard(whole.weight.detach(), 0, group).clone())
        self.bias = nn.Parameter(own_shard(whole.bias.detach(), 0, group).clone()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        [y] = column_parallel(x, [self], self.group, self.sequence_parallel)
        return gather_from_ranks(y, -1, self.group) if self.gather_output else y


def column_parallel(
    x: Tensor, layers: list[ColumnParallelLinear], group: Group, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """Several column layers of one input: its gradients are added up here, and reduced once."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    x, *parameters = as_autocast(x, *weights, *biases)
    return _ColumnParallel.apply(x, group, sequence_parallel, len(layers), *parameters)


def as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast what F.linear would cast under torch.autocast; a Function of ours has to have it done before."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)

    def is_cast(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != torch.float64

    return [tensor.to(dtype) if tensor is not None and is_cast(tensor) else tensor for tensor in tensors]


class _ColumnParallel(Function):
    """Identity forward, all-reduce backward (f), or gather and reduce-scatter of tokens; and the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, by_tokens: bool, count: int, *parameters: Any) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.by_tokens, ctx.count = group, by_tokens, count
        ctx.has_bias = [bias is not None for bias in biases]
        # Of the tokens only this rank's are kept; the others are gathered again in the backward.
        ctx.save_for_backward(x, *weights)
        whole = InFlightAllGather(x, TIME, group).wait() if by_tokens else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        gathering = InFlightAllGather(x, TIME, ctx.group) if ctx.by_tokens else None
        grad_x = sum(grad @ weight.conj() for grad, weight in zip(grads, weights, strict=True))
        whole = gathering.wait() if gathering is not None else x
        if not ctx.needs_input_grad[0]:
            reducing = None
        elif ctx.by_tokens:
            reducing = InFlightReduceScatter(grad_x, TIME, ctx.group)
        else:
            grad_x = grad_x.contiguous()
            pattern = fastest_pattern("all_reduce", ctx.group)
            reducing = all_reduce(grad_x, group=ctx.group, async_op=True, pattern=pattern)
        # What follows hides the reduction.
        inputs = whole.reshape(-1, whole.shape[-1]).conj()
        outputs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_weights = [grad.t() @ inputs for grad in outputs]
        grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
        if reducing is not None:
            scattered = reducing.wait()
            grad_x = scattered if ctx.by_tokens else grad_x
        return grad_x, None, None, None, *grad_weights, *grad_biases


class RowParallelLinear(nn.Module):
    """(..., i/n) to (..., o): the input is this rank's part, the output whole; the bias counts once.

    With `sequence_parallel` the output is this rank's tokens along dim 1, and the bias's gradient is of these
    alone (parallelize.py adds it up). With `split_input` the input is whole, and cut here.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        split_input: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_unless_divided("inputs", in_features, group)
        self.group, self.sequence_parallel, self.split_input = group, sequence_parallel, split_input
        whole = _linear(in_features, out_features, bias, seed)
        self.weight = nn.Parameter(own_shard(whole.weight.detach(), 1, group).clone())
        self.bias = nn.Parameter(whole.bias.detach().clone()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.split_input:
            x = split_to_ranks(x, -1, self.group)
        term = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = scatter_sums(term, TIME, self.group)
        else:
            y = sum_over_ranks(term, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # another one under torch.autocast


class VocabParallelEmbedding(nn.Module):
    """Tokens to (..., width): this rank knows an n-th of the words, and the others' are zero here.

    The vocabulary is padded to a multiple of n; the padding is never looked up. IndexError for a token that
    is outside of the vocabulary (on a GPU a device-side assertion, as nn.Embedding's).
    """

    def __init__(
        self,
        num_words: int,
        width: int,
        group: Group = None,
        sequence_parallel: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.num_words = group, sequence_parallel, num_words
        with seeded(seed):
            whole = torch.randn(num_words, width)
        self.weight = nn.Parameter(own_shard(pad_vocabulary(whole, group), 0, group).clone())

    def forward(self, tokens: Tensor) -> Tensor:
        mine, is_mine = local_words(tokens, len(self.weight), self.num_words, self.group)
        term = F.embedding(mine, self.weight) * is_mine.unsqueeze(-1)
        return (
            scatter_sums(term, TIME, self.group)
            if self.sequence_parallel
            else sum_over_ranks(term, self.group)
        )


def local_words(
    words: Tensor, words_per_rank: int, num_words: int, group: Group, what: str = "token"
) -> tuple[Tensor, Tensor]:
    """Each word's row on this rank, 0 for other ranks' words, and which are this rank's.

    IndexError if one is outside of the vocabulary of `num_words`. On a GPU it has row -1 on all ranks, which
    the lookup refuses: to ask for it here would make the host wait for the device.
    """
    is_known = (words >= 0) & (words < num_words)
    if words.device.type == "cpu" and not is_known.all():
        first = int(words[~is_known][0])
        raise IndexError(f"{what} {first} is outside of the vocabulary, which is 0 to {num_words - 1}.")
    mine = words - dist.get_rank(group) * words_per_rank
    is_mine = (mine >= 0) & (mine < words_per_rank)
    return mine.where(is_mine, 0).where(is_known, -1), is_mine


def pad_vocabulary(whole: Tensor, group: Group) -> Tensor:
    """With rows of zeros at the end, so that the ranks divide them."""
    ranks = dist.get_world_size(group)
    return F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, -len(whole) % ranks))


def refuse_unless_divided(what: str, size: int, group: Group) -> None:
    """Raise WorkbookError unless the ranks can have equal parts."""
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise WorkbookError(f"{size} {what} cannot be divided among {ranks} ranks equally.")


def _linear(in_features: int, out_features: int, bias: bool, seed: int) -> nn.Linear:
    with seeded(seed):
        return nn.Linear(in_features, out_features, bias)
