"""Gradients grow with the number of ranks: the backward normalises each block by its own log-sum-exp."""

from typing import Any

import torch
from torch import Tensor

from comm.point_to_point import InFlightShift
from context_parallel.parallel_model import SharedSequence
from context_parallel.train_ring_attention import arrived, at_least_float32, visits
from lab.trace.timeline import span

TARGET = "context_parallel.train_ring_attention.RingAttention.backward"
KILLER = "tests.context_parallel.test_mutant_killers.test_queries_meet_all_keys_and_gradients_come_home"
CAUSE = "over the keys of all ranks, not over those of one block"
SYMPTOM = "The first loss is right, and the gradients of attention are too large, the more so the more ranks."


def mutant(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, _, _ = ctx.saved_tensors
    sequence: SharedSequence = ctx.sequence
    dq, in_flight = torch.zeros_like(q, dtype=at_least_float32(q)), None
    for source, kv in visits(torch.stack([k, v]), sequence):
        dkv = torch.zeros_like(kv)
        for part in sequence.parts(source):
            with span("attention", "backward", pairs=part.pairs):
                rows, keys = part.queries, part.keys
                dy_own, q_own = dy[:, :, rows], q[:, :, rows]
                y_own, lse_own = sequence.kernel.attend(q_own, *kv[:, :, :, keys], part)
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
        # The right neighbour has these keys next, or in the last step they are its own.
        in_flight = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)
    if in_flight is not None:
        own_dkv += arrived(in_flight)
    return dq.to(q.dtype), *own_dkv, None
