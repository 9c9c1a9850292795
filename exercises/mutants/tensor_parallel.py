"""Wrong implementations of tensor and sequence parallelism."""

from exercises.mutants import mutant

LAYERS = "tests/tensor_parallel/test_layers.py::"
WRAPPERS = "tests/test_wrappers.py::"
DROPOUT = "tests/tensor_parallel/test_dropout.py::"
CROSS_ENTROPY = "tests/tensor_parallel/test_cross_entropy.py::"

mutant(
    "tensor_bias_on_every_rank",
    "A row layer's bias is added n times, which shows only when biases are not zero.",
    target="tensor_parallel.layers.RowParallelLinear.forward",
    changes={
        "term = F.linear(x, self.weight)": "term = F.linear(x, self.weight, self.bias)",
        "return y if self.bias is None else y + self.bias.to(y.dtype)": "return y",
    },
    killer=LAYERS + "test_the_bias_of_a_row_layer_is_added_once",
    cause="added up twice",
    symptom="A row layer's output is wrong, but only when its bias is not zero.",
)

mutant(
    "tensor_column_gradient_not_hidden",
    "Results are right but slow: the backward waits for the input gradient before it computes the weight's.",
    target="tensor_parallel.layers.OverlappedColumn.backward",
    changes={
        (
            "if reducing is not None:\n"
            "    reduced = reducing.wait()\n"
            "    grad_x = reduced if ctx.sequence_parallel else grad_x"
        ): "",
        "flat_x = full.reshape(-1, full.shape[-1])": (
            "if reducing is not None:\n"
            "    reduced = reducing.wait()\n"
            "    grad_x = reduced if ctx.sequence_parallel else grad_x\n"
            "flat_x = full.reshape(-1, full.shape[-1])"
        ),
    },
    killer=LAYERS + "test_the_inputs_gradient_is_sent_while_the_weights_gradient_is_computed",
)

mutant(
    "tensor_column_gradient_not_reduced",
    "Norms and embeddings drift apart: their gradients come from each rank's own attention heads only.",
    target="tensor_parallel.layers.OverlappedColumn.backward",
    changes={
        "reducing = all_reduce(grad_x, group=ctx.group, async_op=True)": "reducing = None",
    },
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[tensor]",
    cause="not added up over the ranks",
)

mutant(
    "tensor_every_rank_at_the_first_position",
    "With sequence parallel all ranks use the first positions: each counts its tokens from 0.",
    target="tensor_parallel.parallelize.PositionsOfOwnTokens.forward",
    changes={
        "own_shard(positions_t, 0, self._group)": (
            "positions_t[: len(own_shard(positions_t, 0, self._group))]"
        ),
    },
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[sequence]",
)

mutant(
    "tensor_batches_of_each_rank",
    "The loss is no loss of any batch: each rank is fed another one, and together they compute one.",
    target="training.guard.refuse_unequal_inputs",
    changes={"len(set(digests)) > 1": "len(digests) < 1"},
    killer="tests/tensor_parallel/test_parallelize.py::"
    "test_ranks_that_are_fed_different_batches_are_refused_on_all_ranks",
    fails_with="DID NOT RAISE",
)

mutant(
    "tensor_heads_share_a_mask",
    "Dropout regularises less: attention heads on different ranks drop the same numbers.",
    target="tensor_parallel.parallelize.RankRandomness.used",
    changes={" + self._rank": ""},
    killer=DROPOUT + "test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one",
)

mutant(
    "tensor_loss_of_a_shard",
    "The loss is lower than that of one process: a probability is relative to one rank's vocabulary entries.",
    target="training.guard._mark_output_as_shard",
    changes={"output.as_subclass(Shard)": "output"},
    killer="tests/tensor_parallel/test_parallelize.py::"
    "test_another_loss_than_the_models_is_refused_for_shards_of_the_vocabulary",
    fails_with="DID NOT RAISE",
)

mutant(
    "tensor_max_not_reduced",
    (
        "The loss is infinite when one rank's largest logit is far above another's: the smallest of "
        "the ranks' maxima is subtracted."
    ),
    target="tensor_parallel.cross_entropy._CrossEntropy.forward",
    changes={'op="max"': 'op="min"'},
    killer=CROSS_ENTROPY + "test_huge_logits_do_not_overflow_wherever_the_largest_is",
)

mutant(
    "tensor_norm_counts_replicas",
    "Clipping is too strong: the norm counts replicated parameters once for each rank.",
    target="training.model_on_rank.ModelOnRank.clip_grad_norm_",
    changes={", uncounted)": ")"},
    killer=WRAPPERS + "test_gradients_are_clipped_by_the_norm_of_one_process",
)

mutant(
    "tensor_norm_of_one_rank",
    "Replicated parameters drift apart: each rank clips by the norm of its own shards.",
    target="training.model_on_rank.ModelOnRank.clip_grad_norm_",
    changes={
        "clipping.clip_grad_norm_(parameters, max_norm, self.norm_groups, norm_type, uncounted)": (
            "nn.utils.clip_grad_norm_(parameters, max_norm)"
        ),
    },
    killer=WRAPPERS + "test_gradients_are_clipped_by_the_norm_of_one_process",
    fails_with="shard only",
)

mutant(
    "tensor_norms_not_synchronised",
    (
        "With sequence parallel norms and biases drift apart: their gradients come from a rank's own "
        "tokens only."
    ),
    target="tensor_parallel.parallelize.TensorParallel.finish_gradient_sync",
    changes={"average_gradients(parameters, self.group)": ""},
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[sequence]",
    cause="not averaged over the ranks",
)

mutant(
    "tensor_other_ranks_tokens_embedded",
    "Embeddings are wrong: each rank adds its first row for every token that another rank owns.",
    target="tensor_parallel.layers.VocabParallelEmbedding.forward",
    changes={" * is_own.unsqueeze(-1)": ""},
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[tensor]",
)

mutant(
    "tensor_padding_gets_probability",
    "The loss is slightly too large: the padding of the vocabulary gets a share of the probability.",
    target="tensor_parallel.parallelize.TensorParallel.loss",
    changes={"self.plain.config.vocab_size": "None"},
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[tensor]",
)

mutant(
    "tensor_recomputed_with_other_masks",
    "Gradients are wrong with dropout and recomputation: heads get other masks in the second forward.",
    target="tensor_parallel.parallelize.RankRandomness.used",
    changes={
        "seed = int(torch.randint(_SEEDS, ())) + self._rank": (
            'self._calls = getattr(self, "_calls", 0) + 1\nseed = 1000 * self._calls + self._rank'
        ),
    },
    killer=DROPOUT + "test_blocks_computed_again_in_the_backward_draw_the_same_masks",
)

mutant(
    "tensor_residual_masks_differ",
    "The residual stream differs by rank: each rank draws its dropout masks from another seed.",
    target="tensor_parallel.parallelize.RankRandomness.__init__",
    changes={
        "torch.manual_seed(int(seed))\nself._rank = dist.get_rank(group)": (
            "self._rank = dist.get_rank(group)\ntorch.manual_seed(int(seed) + self._rank)"
        ),
    },
    killer=DROPOUT + "test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one",
)

mutant(
    "tensor_row_gathers_its_outputs",
    "Ranks agree, the loss falls, and it is wrong: a row layer's output uses an n-th of the layer's inputs.",
    target="tensor_parallel.layers.RowParallelLinear.forward",
    changes={
        "y = sum_over_ranks(term, self.group)": (
            "from comm.functions import gather_from_ranks, split_to_ranks\n"
            "\n"
            "own = split_to_ranks(term, -1, self.group)\n"
            "y = gather_from_ranks(own, -1, self.group, term.shape[-1])"
        ),
    },
    killer=WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[tensor]",
)
