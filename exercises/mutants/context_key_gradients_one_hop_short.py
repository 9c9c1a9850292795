"""Keys and values learn nonsense: their gradients stop one hop before the rank to which they belong."""

from typing import Any

import torch
from torch import Tensor

from comm.point_to_point import InFlightShift
from context_parallel.parallel_model import SharedSequence
from context_parallel.train_ring_attention import arrived, at_least_float32, visits
from lab.trace.timeline import span

TARGET = "context_parallel.train_ring_attention.RingAttention.backward"
KILLER = "tests.context_parallel.test_mutant_killers.test_queries_meet_all_keys_and_gradients_come_home"
CAUSE = "to the rank from which the keys came"
SYMPTOM = "The first loss is right. The gradients of keys and values are wrong, those of queries are right."


def mutant(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, y, lse = ctx.saved_tensors
    sequence: SharedSequence = ctx.sequence
    dq, in_flight = torch.zeros_like(q, dtype=at_least_float32(q)), None
    for source, kv in visits(torch.stack([k, v]), sequence):
        dkv = torch.zeros_like(kv)
        for part in sequence.parts(source):
            with span("attention", "backward", pairs=part.pairs):
                rows, keys = part.queries, part.keys
                dy_own, q_own, y_own, lse_own = (each[:, :, rows] for each in (dy, q, y, lse))
                dq_term, *dkv_terms = sequence.kernel.backward(
                    dy_own, q_own, *kv[:, :, :, keys], y_own, lse_own, part
                )
                dq[:, :, rows] += dq_term
                dkv[0][:, :, keys] += dkv_terms[0]
                dkv[1][:, :, keys] += dkv_terms[1]
        if source == sequence.rank:
            own_dkv = dkv  # it waits here for the terms of the other ranks
            continue
        if in_flight is not None:
            dkv += arrived(in_flight)  # the terms of the ranks where these keys have been before
        if source == (sequence.rank + 1) % sequence.size:
            own_dkv += dkv  # the last step
        else:
            in_flight = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)
    return dq.to(q.dtype), *own_dkv, None
