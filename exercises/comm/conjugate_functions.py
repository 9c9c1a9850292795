"""Collectives and their conjugates. Write `sum_over_ranks`, `copy_to_ranks`, `gather_from_ranks` and
`split_to_ranks` of comm/functions.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/functions.py yet: it has the solution.

You may use:

    InFlightAllGather(shard: Tensor, dim: int, group: Group, size: int | None = None)
        An all-gather along `dim`.
    own_shard(x: Tensor, dim: int, group: Group) -> Tensor
        Return this rank's shard of `x` along `dim`, as a view.
    summed(x: Tensor, group: Group) -> Tensor
        Return the sum over ranks.

Check it with `python -m exercises check conjugate_functions`.
"""

from torch import Tensor

from comm.collectives import Group
from comm.functions import InFlightAllGather, _Pair, own_shard, summed


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of all ranks' `x`. All ranks compute the same loss from it, which counts once.

    Use `_Pair.apply(x, forward, backward)`: `forward` makes the output from x, and `backward` makes
    the gradient of x from that of the output. `summed` returns the sum over ranks in a new tensor,
    and `own_shard` this rank's shard as a view. `InFlightAllGather(shard, dim, group, size).wait()`
    returns all shards together. No function may return or change the memory of its input.
    """
    raise NotImplementedError("`sum_over_ranks` is not written yet.")


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`, which is the same on all ranks. Each rank computes something else from it."""
    raise NotImplementedError("`copy_to_ranks` is not written yet.")


def gather_from_ranks(x: Tensor, dim: int, group: Group = None, size: int | None = None) -> Tensor:
    """Return the shards of all ranks, together along `dim`.

    All ranks compute the same loss from the result. If shards differ, `size` is the full size.
    """
    raise NotImplementedError("`gather_from_ranks` is not written yet.")


def split_to_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return this rank's shard along `dim` of `x`, which is the same on all ranks.

    Each rank computes something else from its shard.
    """
    raise NotImplementedError("`split_to_ranks` is not written yet.")
