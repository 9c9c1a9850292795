"""Wrong implementations of context parallelism."""

from exercises.mutants import mutant

WRAPPERS = "tests/test_wrappers.py::"
EQUIVALENCE = "tests/context_parallel/test_equivalence.py::"

mutant(
    "context_backward_by_the_blocks_own_sum",
    "Gradients grow with the number of ranks: the backward normalises each block by its own log-sum-exp.",
    target="context_parallel.train_ring_attention.RingAttention.backward",
    changes={
        "dy_own, q_own, y_own, lse_own = (each[:, :, rows] for each in (dy, q, y, lse))": (
            "dy_own, q_own = dy[:, :, rows], q[:, :, rows]\n"
            "y_own, lse_own = sequence.kernel.attend(q_own, *kv[:, :, :, keys], part)"
        ),
    },
    killer=EQUIVALENCE + "test_attention_equals_one_process[queries meet all keys and gradients come home]",
    symptom=(
        "The first loss is right, and the gradients of attention are too large, the more so the more ranks."
    ),
)

mutant(
    "context_documents_ignored_on_the_ring",
    "Packed documents see one another: only the rank's own keys are masked, those that arrive are not.",
    target="context_parallel.parallel_model.SharedSequence.parts",
    changes={"self.documents)": "self.documents if source == self.rank else None)"},
    killer=EQUIVALENCE + "test_attention_equals_one_process[no query attends to another document]",
    symptom="With --documents the loss depends on the number of ranks, and without it does not.",
)

mutant(
    "context_every_block_causal",
    "Tokens see too little of the past, and some see the future: the causal mask counts within a block.",
    target="context_parallel.sequence_cut.SequenceCut.parts",
    changes={
        "if is_causal and visiting.start > own.start:\n    continue": "",
        "is_causal and visiting.start == own.start": "is_causal",
    },
    killer=EQUIVALENCE + "test_attention_equals_one_process[no query attends to a later key]",
    symptom="The loss falls faster than it can, and the trained model writes nonsense.",
)

mutant(
    "context_gradient_summed",
    "With SGD the learning rate grows with the number of ranks: gradients are summed, not averaged.",
    target="context_parallel.parallel_model.ContextParallel.finish_gradient_sync",
    changes={
        "average_gradients(self.module.parameters(), self.group)": (
            "from comm.collectives import all_reduce\n"
            "\n"
            "for parameter in self.module.parameters():\n"
            "    if parameter.grad is not None:\n"
            "        all_reduce(parameter.grad, group=self.group)"
        ),
    },
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[ring]",
    cause="sum",
    symptom="With SGD the learning rate grows with the number of ranks. With Adam nothing is noticed.",
)

mutant(
    "context_heads_in_the_wrong_order",
    "The loss is too high on two ranks and more: the results of the heads come back in another order.",
    target="context_parallel.train_all_to_all_attention.all_heads_of_own_tokens",
    changes={".transpose(1, 2)": ""},
    killer=EQUIVALENCE + "test_attention_equals_one_process[each head comes back to its place]",
    cause="right and in the wrong order",
    symptom="The loss is too high with two ranks and more. A model with as many heads as ranks trains well.",
)

mutant(
    "context_joined_without_rescaling",
    "The loss is wrong on two ranks and more: results over the keys of several ranks are just averaged.",
    target="context_parallel.block_attention.join_results",
    changes={
        "weights = [torch.exp(each - joined).unsqueeze(-1) for each in (lse, other_lse)]": "",
        "weights[0] * y + weights[1] * other_y": "(y + other_y) / 2",
    },
    killer=EQUIVALENCE + "test_attention_equals_one_process[queries meet all keys and gradients come home]",
    symptom=(
        "The loss is that of one process on one rank, and a different one for each other number of ranks."
    ),
)

mutant(
    "context_key_gradients_one_hop_short",
    "Keys and values learn nonsense: their gradients stop one hop before the rank to which they belong.",
    target="context_parallel.train_ring_attention.RingAttention.backward",
    changes={
        "in_flight = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)": (
            "if source == (sequence.rank + 1) % sequence.size:\n"
            "    own_dkv += dkv\n"
            "else:\n"
            "    in_flight = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)"
        ),
        "if in_flight is not None:\n    own_dkv += in_flight.wait()": "",
    },
    killer=EQUIVALENCE + "test_attention_equals_one_process[queries meet all keys and gradients come home]",
    symptom=(
        "The first loss is right. The gradients of keys and values are wrong, those of queries are right."
    ),
)

mutant(
    "context_positions_contiguous",
    "The loss is too high from the first step: a rank counts positions as if its tokens were one chunk.",
    target="context_parallel.sequence_cut.SequenceCut.positions",
    changes={
        "return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in self.chunks[rank]])": (
            "begin = sum(self.length(before) for before in range(rank))\n"
            "return torch.arange(begin, begin + self.length(rank))"
        ),
    },
    killer=EQUIVALENCE + "test_a_rank_uses_its_own_positions_and_targets",
    symptom="The loss is not that of one process, from the first step on.",
)

mutant(
    "context_targets_of_other_tokens",
    "The loss hardly falls: tokens are cut in zigzag and their targets into contiguous chunks.",
    target="context_parallel.parallel_model.ContextParallel.loss",
    changes={
        "self._cut(targets_bt.shape[1], dist.get_world_size(self.group))": (
            "SequenceCut.contiguous(targets_bt.shape[1], dist.get_world_size(self.group))"
        ),
    },
    killer=EQUIVALENCE + "test_a_rank_uses_its_own_positions_and_targets",
    symptom="The loss hardly falls, although the logits of the first step are right.",
)
