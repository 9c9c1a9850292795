"""The column-parallel layer. Write `column_parallel` and `full_input` of tensor_parallel/layers.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/layers.py yet: it
has the solution.

You may use:

    as_autocast(*tensors: Tensor | None) -> list[Tensor | None]
        Cast what F.linear would cast under torch.autocast, which does not reach into an autograd
        function.
    copy_to_ranks(x: Tensor, group: Group = None) -> Tensor
        Identity forward, all-reduce backward (f in Megatron-LM).
    gather_tokens(x: Tensor, dim: int, group: Group = None) -> Tensor
        All-gather along `dim` forward, reduce-scatter backward (g of sequence parallelism).
    TIME = 1

Check it with `python -m exercises check column_parallel`.
"""

import torch.nn.functional as F
from torch import Tensor

from comm.collectives import Group
from comm.functions import copy_to_ranks, gather_tokens
from tensor_parallel.layers import TIME, ColumnParallelLinear, OverlappedColumn, as_autocast


def column_parallel(x: Tensor, layers: list[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Apply layers of equal options (q, k and v) to one input, whose gradient is then reduced once.

    Each layer has this rank's n-th of the outputs: `weight`, `bias`, which may be None, `group`,
    `sequence_parallel` and `overlap`. If `overlap`, return OverlappedColumn.apply(x, group,
    sequence_parallel, *weights, *biases), with x, weights and biases as `as_autocast(x, *weights,
    *biases)` returns them. Otherwise make the full input, once.
    """
    raise NotImplementedError("`column_parallel` is not written yet.")


def full_input(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Return the full input of a column-parallel layer, from which each rank computes other outputs.

    Without sequence parallelism every rank has the same x, in full. With it x is this rank's
    shard of the tokens, along TIME. The gradient that a rank computes for the full input is one
    term of it.
    """
    raise NotImplementedError("`full_input` is not written yet.")
