"""Wrong implementations of context parallelism."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.collectives import all_reduce
from comm.functions import exchange_shards
from comm.point_to_point import InFlightShift
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import Part, SequenceCut
from context_parallel.train_ring_attention import arrived, at_least_float32, visits
from exercises.mutants import mutant
from lab.trace.timeline import span


@mutant(
    target="context_parallel.train_ring_attention.RingAttention.backward",
    killer="tests.context_parallel.test_equivalence.test_queries_meet_all_keys_and_gradients_come_home",
    symptom=(
        "The first loss is right, and the gradients of attention are too large, the more so the more ranks."
    ),
)
def context_backward_by_the_blocks_own_sum(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients grow with the number of ranks: the backward normalises each block by its own log-sum-exp."""
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


@mutant(
    target="context_parallel.parallel_model.SharedSequence.parts",
    killer="tests.context_parallel.test_equivalence.test_no_query_attends_to_another_document",
    symptom="With --documents the loss depends on the number of ranks, and without it does not.",
)
def context_documents_ignored_on_the_ring(self, source: int) -> list[Part]:
    """Packed documents see one another: only the rank's own keys are masked, those that arrive are not."""
    documents = self.documents if source == self.rank else None
    return list(self.cut.parts(self.rank, source, self.is_causal, documents))


@mutant(
    target="context_parallel.sequence_cut.SequenceCut.parts",
    killer="tests.context_parallel.test_equivalence.test_no_query_attends_to_a_later_key",
    symptom="The loss falls faster than it can, and the trained model writes nonsense.",
)
def context_every_block_causal(
    self, rank: int, source: int, is_causal: bool = True, documents: Tensor | None = None
) -> Iterator[Part]:
    """Tokens see too little of the past, and some see the future: the causal mask counts within a block."""
    for _, queries in self._placed(rank):
        for _, keys in self._placed(source):
            yield Part(queries, keys, is_causal)


@mutant(
    target="context_parallel.parallel_model.ContextParallel.finish_gradient_sync",
    killer="tests.context_parallel.test_equivalence.test_the_terms_of_all_ranks_add_up_to_each_gradient",
    cause="sum",
    symptom="With SGD the learning rate grows with the number of ranks. With Adam nothing is noticed.",
)
def context_gradient_summed(self) -> None:
    """With SGD the learning rate grows with the number of ranks: gradients are summed, not averaged."""
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, group=self.group)


@mutant(
    target="context_parallel.train_all_to_all_attention.all_heads_of_own_tokens",
    killer="tests.context_parallel.test_equivalence.test_each_head_comes_back_to_its_place",
    cause="right and in the wrong order",
    symptom="The loss is too high with two ranks and more. A model with as many heads as ranks trains well.",
)
def context_heads_in_the_wrong_order(y_bhte: Tensor, sequence: SharedSequence) -> Tensor:
    """The loss is too high on two ranks and more: the results of the heads come back in another order."""
    lengths = sequence.lengths
    own = lengths[sequence.rank]
    arrived = exchange_shards(y_bhte, 2, sequence.group, lengths, [own] * sequence.size)
    return arrived.unflatten(2, (sequence.size, own)).flatten(1, 2)


@mutant(
    target="context_parallel.block_attention.join",
    killer="tests.context_parallel.test_equivalence.test_queries_meet_all_keys_and_gradients_come_home",
    symptom=(
        "The loss is that of one process on one rank, and a different one for each other number of ranks."
    ),
)
def context_joined_without_rescaling(
    y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss is wrong on two ranks and more: results over the keys of several ranks are just averaged."""
    return (y + other_y) / 2, torch.logaddexp(lse, other_lse)


@mutant(
    target="context_parallel.train_ring_attention.RingAttention.backward",
    killer="tests.context_parallel.test_equivalence.test_queries_meet_all_keys_and_gradients_come_home",
    symptom=(
        "The first loss is right. The gradients of keys and values are wrong, those of queries are right."
    ),
)
def context_key_gradients_one_hop_short(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """Keys and values learn nonsense: their gradients stop one hop before the rank to which they belong."""
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


@mutant(
    target="context_parallel.sequence_cut.SequenceCut.positions",
    killer="tests.context_parallel.test_equivalence.test_a_rank_uses_its_own_positions_and_targets",
    symptom="The loss is not that of one process, from the first step on.",
)
def context_positions_contiguous(self, rank: int) -> Tensor:
    """The loss is too high from the first step: a rank counts positions as if its tokens were one piece."""
    begin = sum(self.length(before) for before in range(rank))
    return torch.arange(begin, begin + self.length(rank))


@mutant(
    target="context_parallel.parallel_model.ContextParallel.loss",
    killer="tests.context_parallel.test_equivalence.test_a_rank_uses_its_own_positions_and_targets",
    symptom="The loss hardly falls, although the logits of the first step are right.",
)
def context_targets_of_other_tokens(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """The loss hardly falls: tokens are cut in zigzag and their targets into contiguous pieces."""
    cut = SequenceCut.contiguous(targets_bt.shape[1], self.sequence.size)
    own = cut.own(targets_bt, self.sequence.rank)
    return F.cross_entropy(logits_btv.flatten(0, 1), own.flatten())
