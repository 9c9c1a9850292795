"""The ring of keys and values. Write `RingAttention.forward` and `visits` of
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
    join(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]
        Return the attention over the keys of both results, and its log-sum-exp (b, h, t).
    NO_KEY = -1e+30
    sequence.size: int
        The number of ranks.

Check it with `python -m exercises check ring_attention_forward`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from comm.point_to_point import InFlightShift
from context_parallel.block_attention import NO_KEY, join
from context_parallel.parallel_model import SharedSequence
from context_parallel.train_ring_attention import arrived, at_least_float32
from lab.trace.timeline import span


def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SharedSequence) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks, in the queries' shape.

    `q` is (b, h, t, e); `k` and `v` may have fewer heads. `visits` yields the keys and values of
    each rank in turn. For each of them `sequence.parts(source)` lists parts, each with slices
    `queries` and `keys` of the tokens, and `sequence.kernel.attend(q, k, v, part)`, called with
    these tokens only, returns what the queries find there and its log-sum-exp. Join it to what they
    have found before: begin with zeros and a log-sum-exp of NO_KEY, both at least float32. Save q,
    k, v, the result in q's dtype and its log-sum-exp with ctx.save_for_backward, and the sequence
    as ctx.sequence.
    """
    raise NotImplementedError("`RingAttention.forward` is not written yet.")


def visits(kv: Tensor, sequence: SharedSequence) -> Iterator[tuple[int, Tensor]]:
    """Yield the keys and values of each rank, own first, while the next ones are on their way.

    `kv` (2, b, h, t, e) has those of this rank. Each item is the rank that they come from, and
    the tensor. `InFlightShift(outgoing, incoming, sequence.group)` starts a message to the
    right neighbour and one from the left; `sequence.block_like(kv, source)` makes an empty
    tensor for what rank `source`, modulo the number of ranks, has. `arrived` waits, and returns
    it. After the last rank nothing is sent.
    """
    raise NotImplementedError("`visits` is not written yet.")
