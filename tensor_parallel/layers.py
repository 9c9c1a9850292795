"""Tensor-parallel layers divide one weight matrix among the n ranks of a group: by columns, or by rows.

      x ──► column parallel ──► some of the outputs ──► act ──► row parallel ──► sum over ranks ──► y
            W = [W0 | W1]       x W0    (rank 0)                V = [V0]         act(x W0) V0
                                x W1    (rank 1)                    [V1]       + act(x W1) V1

Here y = act(x W) V. PyTorch stores a weight transposed, (outputs, inputs): columns of W are dim 0 of
`weight`, rows are dim 1.

A column-parallel layer needs the full input, and computes some of the outputs. A row-parallel layer needs
some of the inputs, and computes one term of each output. What stands between the two works on each
feature alone (a GELU), or on features that are all on one rank (a head of attention). The other order
would need a sum before the GELU, because GELU(a + b) is not GELU(a) + GELU(b).

    forward     column: nothing to send                row: all-reduce of the outputs
    backward    column: all-reduce of x's gradient     row: nothing to send

A rank has only some of the outputs. The gradient of x that it computes comes from these alone, so it is
one term, and the backward of the column layer adds the terms up. The row layer's backward sends nothing:
all ranks compute the same loss from the full y, so each has y's complete gradient, and not one term of it.

With `sequence_parallel` each rank holds an n-th of the tokens before and after such a pair of layers. Then
the column layer all-gathers the tokens of its input, and reduce-scatters the gradient in its backward. The
row layer reduce-scatters its outputs, and all-gathers in its backward. Activations outside of the pairs need
an n-th of the memory, and an all-gather and a reduce-scatter send as many bytes as one all-reduce.

A column layer's backward computes two products: the gradient of x comes first, and with `overlap`, the
default, it is reduced while the second one, the gradient of the weight, is computed:

      overlap       | grad of x | grad of W |
                                | all-reduce of grad of x |
      --no-overlap  | grad of x | grad of W | all-reduce of grad of x |

F.linear's backward computes both products in one step of autograd, and a sum could start only after it.
`OverlappedColumn` starts the sum between them. With `sequence_parallel` it saves only this rank's tokens,
and gathers the others again in the backward: five transfers for a pair of layers, four without overlap.

After Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, section 3, and Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
https://arxiv.org/abs/2205.05198, section 4.2. The differentiable collectives are in comm/functions.py.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from comm.collectives import Group, all_reduce
from comm.functions import (
    InFlightAllGather,
    InFlightReduceScatter,
    copy_to_ranks,
    gather_from_ranks,
    gather_tokens,
    own_shard,
    scatter_sums,
    sum_over_ranks,
)
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig

TIME = 1  # the dim that sequence parallelism divides: x is (batch, time, width)


def padded_shard(full: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's n-th of the tensor along `dim`, as a view. Rows of zeros make n divide it."""
    if dim == 0:  # a vocabulary has any size
        full = F.pad(full, (0, 0) * (full.dim() - 1) + (0, -len(full) % dist.get_world_size(group)))
    return own_shard(full, dim, group)


def divide_parameter(parameter: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Replace the parameter's values, `size` along `dim`, by this rank's shard. The object stays the same.

    So an optimizer keeps it, and tied layers share it: the second one finds a shard already.
    """
    if parameter.shape[dim] == size:
        parameter.data = padded_shard(parameter.detach(), dim, group).clone()
    return parameter


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes an n-th of the outputs: (..., inputs) to (..., outputs/n).

    The parameters of `plain`, equal on all ranks, become this rank's shards; zeros pad a vocabulary that n
    does not divide. With `gather_output` every rank gets all outputs. With `sequence_parallel` the input is
    this rank's shard of the tokens, along dim 1, and the output has all tokens. `dims` says along which dim a
    parameter is divided, and its full size there.
    """

    def __init__(
        self,
        plain: nn.Linear,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.gather_output, self.overlap = gather_output, overlap
        if gather_output:
            validate_divisible("outputs", plain.out_features, group)
        self.weight, self.bias = plain.weight, plain.bias
        for parameter in plain.parameters():
            divide_parameter(parameter, 0, plain.out_features, group)
        self.dims = {name: (0, plain.out_features) for name, _ in plain.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        [y] = column_parallel(x, [self])
        # All-gather forward; own shard backward, because all ranks have the same gradient of y.
        return gather_from_ranks(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank uses an n-th of the inputs: (..., inputs/n) to (..., outputs).

    With `sequence_parallel` the output is this rank's shard of the tokens, along dim 1; the bias's gradient
    then covers these tokens only, and parallelize.py adds it up. Raises WorkbookError unless n divides the
    inputs.
    """

    def __init__(self, plain: nn.Linear, group: Group = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        validate_divisible("inputs", plain.in_features, group)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight, self.bias = divide_parameter(plain.weight, 1, plain.in_features, group), plain.bias
        self.dims = {"weight": (1, plain.in_features)}

    def forward(self, x: Tensor) -> Tensor:
        term = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = scatter_sums(term, TIME, self.group)  # reduce-scatter forward, all-gather backward
        else:
            y = sum_over_ranks(term, self.group)  # all-reduce forward, identity backward
        # The bias is added after the sum, and so it counts once; torch.autocast may have lowered y's dtype.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def column_parallel(x: Tensor, layers: list[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Apply layers of equal options (q, k and v) to one input, whose gradient is then reduced once."""
    layer = layers[0]
    if layer.overlap:
        cast, *parameters = as_autocast(x, *[each.weight for each in layers], *[each.bias for each in layers])
        return OverlappedColumn.apply(cast, layer.group, layer.sequence_parallel, *parameters)
    x = full_input(x, layer.group, layer.sequence_parallel)
    return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)


def full_input(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Return the full input of a column-parallel layer; the backward adds up its gradient over ranks."""
    # Each rank computes one term of that gradient: the part that comes from its own outputs.
    if sequence_parallel:
        return gather_tokens(x, TIME, group)  # all-gather forward, reduce-scatter backward
    return copy_to_ranks(x, group)  # nothing is sent forward, all-reduce backward


class OverlappedColumn(torch.autograd.Function):
    """Do what `full_input` and F.linear do, and hide the reduction of the backward.

    After the input, `parameters` has the weights of all layers, and then their biases, which may be None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence_parallel: bool, *parameters: Any) -> Any:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        full = InFlightAllGather(x, TIME, group).wait() if sequence_parallel else x
        return tuple(F.linear(full, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        gathering = InFlightAllGather(x, TIME, ctx.group) if ctx.sequence_parallel else None
        grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
        full = x if gathering is None else gathering.wait()
        reducing: Any = None
        if ctx.needs_input_grad[0] and ctx.sequence_parallel:
            reducing = InFlightReduceScatter(grad_x, TIME, ctx.group)
        elif ctx.needs_input_grad[0]:  # else it is the model's own input
            reducing = all_reduce(grad_x, group=ctx.group, async_op=True)
        # These products hide the reduction.
        flat_x = full.reshape(-1, full.shape[-1])
        flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_weights = [grad.t() @ flat_x for grad in flat_grads]
        grad_biases = [g.sum(0) if has else None for g, has in zip(flat_grads, ctx.has_bias, strict=True)]
        if reducing is not None:
            reduced = reducing.wait()
            grad_x = reduced if ctx.sequence_parallel else grad_x  # the all-reduce worked in place
        return grad_x, None, None, *grad_weights, *grad_biases


def as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast as F.linear does under torch.autocast: a backward runs without it, and needs one dtype."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):  # a shape alone has no autocast
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds an n-th of the vocabulary: tokens to (..., width).

    A rank's term is zero for tokens whose entries other ranks hold, and the sum over ranks is the embedding.
    The vocabulary is padded to a multiple of n.
    """

    def __init__(self, plain: nn.Embedding, group: Group = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.vocab_size = plain.num_embeddings
        self.weight = divide_parameter(plain.weight, 0, self.vocab_size, group)
        self.dims = {"weight": (0, self.vocab_size)}

    def forward(self, tokens: Tensor) -> Tensor:
        rows, is_own = own_rows(tokens, len(self.weight), self.vocab_size, self.group)
        term = F.embedding(rows, self.weight) * is_own.unsqueeze(-1)
        if self.sequence_parallel:
            return scatter_sums(term, TIME, self.group)
        return sum_over_ranks(term, self.group)


def own_rows(tokens: Tensor, rows_per_rank: int, vocab_size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return each token's row in this rank's weight, and which tokens have one; the others get row 0.

    A token outside of the vocabulary gets row -1 on every rank, which the lookup refuses.
    """
    rows = tokens - dist.get_rank(group) * rows_per_rank
    is_own = (rows >= 0) & (rows < rows_per_rank)
    is_known = (tokens >= 0) & (tokens < vocab_size)
    return rows.where(is_own, 0).where(is_known, -1), is_own


def validate_heads(config: GPTConfig, group: Group) -> None:
    """Raise WorkbookError unless the ranks can have equally many heads."""
    for what, heads in ("query heads", config.num_heads), ("key and value heads", config.kv_heads):
        validate_divisible(what, heads, group, "; --size 24heads takes 2, 3, 4, 6, 8, 12 or 24 ranks")


def validate_divisible(what: str, size: int, group: Group, cure: str = "") -> None:
    """Raise WorkbookError unless the number of ranks divides `size`."""
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise WorkbookError(f"{size} {what} cannot be divided among {ranks} ranks equally{cure}.")
