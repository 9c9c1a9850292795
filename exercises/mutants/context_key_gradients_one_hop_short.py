"""Keys and values learn nonsense: their gradients stop one hop before the rank to which they belong."""

from typing import Any

import torch
from torch import Tensor

from comm.point_to_point import InFlightShift
from context_parallel.parallel_model import Sequence
from context_parallel.train_ring_attention import visits

TARGET = "context_parallel.train_ring_attention.RingAttention.backward"
KILLER = "tests.context_parallel.test_mutant_killers.test_queries_meet_all_keys_and_gradients_come_home"
CAUSE = "to the rank from which the keys came"
SYMPTOM = "The first loss is right. The gradients of keys and values are wrong, those of queries are right."


def mutant(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, y, lse = ctx.saved_tensors
    sequence: Sequence = ctx.sequence
    dq, dkv_behind = torch.zeros_like(q), None
    for source, kv in visits(torch.stack([k, v]), sequence):
        dkv = torch.zeros_like(kv)
        for part in sequence.parts(source):
            rows, keys = part.queries, part.keys
            of_queries = (each[:, :, rows] for each in (y, lse))
            dq_term, *dkv_terms = sequence.kernel.backward(
                dy[:, :, rows], q[:, :, rows], *kv[:, :, :, keys], *of_queries, part
            )
            dq[:, :, rows] += dq_term
            dkv[:, :, :, keys] += torch.stack(dkv_terms)
        if source == sequence.rank:
            own_dkv = dkv
            continue
        if dkv_behind is not None:
            dkv += dkv_behind.wait()
        if source == (sequence.rank + 1) % sequence.size:
            own_dkv += dkv
            break
        dkv_behind = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)
    return dq, *own_dkv, None
