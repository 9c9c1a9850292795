"""Gradients that follow their keys. Write `RingAttention.backward` of
context_parallel/train_ring_attention.py.

Read notebooks/11_long_sequences.ipynb first. Do not open context_parallel/train_ring_attention.py yet: it
contains the solution.

You may use:

    arrived(shift: InFlightShift) -> Tensor
        Return what comes from the left neighbour, once it is there.
    at_least_float32(x: Tensor) -> torch.dtype
        Return the dtype in which results of several blocks are added up.
    InFlightShift(outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None)
        A message to the right neighbour and one from the left one, for all ranks of a group together.
    part.pairs: float
        Return how many pairs of a query and a key are computed, in one head of one example.
    sequence.block_like(kv: Tensor, source: int) -> Tensor
        Return an empty tensor for keys and values of rank `source`, modulo the number of ranks.
    sequence.parts(source: int) -> list[Part]
        Return the parts of the attention of this rank's queries to the keys of rank `source`.
    SharedSequence(group: Group, cut: SequenceCut, kernel: Kernel = KERNELS['fused'], is_causal: bool =
            True, documents: Tensor | None = None, _parts: dict[int, list[Part]], _mask: Tensor | None =
            None)
        Hold what attention needs to know of the sequences that the ranks have cut among them.
    span(name: str, kind: str = 'compute', **args: Any) -> AbstractContextManager[None]
        Record the time of a `with` block, also if it raises.
    visits(kv: Tensor, sequence: SharedSequence) -> Iterator[tuple[int, Tensor]]
        Yield the keys and values of each rank, own first, while the next ones are on their way.
    sequence.group: Group, sequence.kernel: Kernel, sequence.rank: int

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
