"""Gradients that follow their keys. Write `RingAttention.backward` of
context_parallel/train_ring_attention.py.

Read notebooks/11_long_sequences.ipynb first. Do not open context_parallel/train_ring_attention.py yet: it
has the solution.

You may use:

    arrived(shift: InFlightShift) -> Tensor
        Return what comes from the left neighbour, once it is there.
    at_least_float32(x: Tensor) -> torch.dtype
        Return the dtype in which results of several blocks are added up.
    InFlightShift(outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None)
        A message to the right neighbour and one from the left one, for all ranks of a group together.
    visits(kv: Tensor, sequence: SharedSequence) -> Iterator[tuple[int, Tensor]]
        Yield the keys and values of each rank, own first, while the next ones are on their way.
    sequence.parts(source) -> list[Part]
        The attention to the keys of rank `source`, in parts.
    sequence.block_like(kv, source) -> Tensor
        An empty tensor for keys and values of a rank.
    sequence.group: Group

Check it with `python -m exercises check ring_attention_backward`.
"""

from typing import Any

import torch
from torch import Tensor

from comm.point_to_point import InFlightShift
from context_parallel.parallel_model import SharedSequence
from context_parallel.train_ring_attention import arrived, at_least_float32, visits
from lab.trace.timeline import span


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the gradients of q, k and v, and None for the sequence.

    `visits` brings the keys and values of each rank once more. For each part
    `sequence.kernel.backward(dy, q, k, v, y, lse, part)`, called with the part's tokens only,
    returns its terms of the gradients of q, k and v; `y` and `lse` are those over all keys, as
    saved. The gradient of q stays here. That of a rank's keys and values is a sum over the queries
    of all ranks: it travels behind them with `InFlightShift` and `arrived`, as they do in `visits`,
    and the last rank that has these keys sends it to the rank that they belong to.
    """
    raise NotImplementedError("`RingAttention.backward` is not written yet.")
