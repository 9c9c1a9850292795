"""Wrong implementations of meshes and of their plans."""

from exercises.mutants import mutant

ELASTIC = "tests/hybrid_parallel/test_elastic.py::"
NARRATED_AXES = "tests/hybrid_parallel/test_narrated_axes.py::"
EQUIVALENCE = "tests/hybrid_parallel/test_equivalence.py::"
MESH = "tests/hybrid_parallel/test_mesh.py::"
PLANNER = "tests/hybrid_parallel/test_planner_models.py::"

mutant(
    "elastic_divides_by_the_old_world_size",
    "Survivors of a death divide by the number of ranks before it.",
    target="hybrid_parallel.elastic.train_elastic.ElasticReplica.step",
    changes={
        "loss = self.sum_of_losses(self.model, *mine) / len(x)": (
            'self.first_ranks = getattr(self, "first_ranks", ranks)\n'
            "loss = self.sum_of_losses(self.model, *mine) / len(x) * ranks / self.first_ranks"
        ),
    },
    killer=ELASTIC + "test_two_deaths_leave_every_gradient_that_of_one_process",
    symptom="After a death gradients are too small, and with Adam the loss looks normal.",
)

mutant(
    "elastic_step_applied_twice",
    "A rank takes a step twice: it takes over the state of another, and keeps its own count of steps.",
    target="hybrid_parallel.elastic.train_elastic.ElasticReplica.catch_up",
    changes={"self.steps = max(counts)": ""},
    killer=ELASTIC
    + "test_a_rank_that_missed_a_step_which_others_have_taken_takes_over_their_state_and_takes_it_once",
    symptom="After a death the replicas differ: one of them has taken a step twice.",
)

mutant(
    "hybrid_auxiliary_loss_of_each_microbatch",
    "More microbatches balance experts harder: the weight of the auxiliary loss is not divided among them.",
    target="hybrid_parallel.expert_axis.ExpertModel.__init__",
    changes={"experts.aux_weight / microbatches": "experts.aux_weight"},
    killer=NARRATED_AXES + "test_the_auxiliary_loss_in_a_pipeline_is_the_mean_over_its_microbatches",
    cause="once too often for each microbatch",
    symptom="With more microbatches experts are chosen more equally, and the loss stays higher.",
)

mutant(
    "hybrid_clipped_by_one_tensor_ranks_norm",
    "With ZeRO 3 beside tensor parallelism ranks clip differently: the norm is that of the data axis alone.",
    target="hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_",
    changes={
        "trained = self.trained_parameters()": (
            "trained = self.trained_parameters()\n"
            "if self.sizes.zero == 3:\n"
            "    return self.data.clip_grad_norm_(max_norm)"
        ),
    },
    killer=EQUIVALENCE + "test_divided_layers_in_shards_of_zero_3_equal_one_process",
)

mutant(
    "hybrid_experts_averaged_over_all_replicas",
    "Experts learn from the tokens of other experts: their gradients are averaged over all replicas.",
    target="hybrid_parallel.expert_axis.ReplicatedExperts.__init__",
    changes={"(self._experts, groups.replicas)": "(self._experts, groups.everyone)"},
    killer=EQUIVALENCE + "test_experts_divided_among_replicas_equal_one_process",
    symptom="With divided experts the loss falls more slowly than on one process, and experts become alike.",
)

mutant(
    "hybrid_mean_over_data_without_context",
    "Ranks that have other tokens of the same examples drift apart: the mean is taken along data only.",
    target="hybrid_parallel.hybrid.HybridParallel._replicate",
    changes={"group, sizes = self.mesh.replicas, self.sizes": "group, sizes = self.mesh.data, self.sizes"},
    killer=NARRATED_AXES + "test_gradients_are_means_over_the_ranks_of_the_data_and_the_context_axis",
    symptom="With a context axis the loss falls more slowly, and ranks end with different parameters.",
)

mutant(
    "hybrid_mean_over_the_wrong_axis",
    "Replicas drift apart, and layers that are divided get mixed up: the mean is taken over the tensor axis.",
    target="hybrid_parallel.hybrid.HybridParallel._replicate",
    changes={
        "data = BucketDataParallel(self.module, group)": (
            "data = BucketDataParallel(self.module, group)\ndata.group = self.mesh.tensor"
        ),
    },
    killer=EQUIVALENCE + "test_replicas_of_divided_tokens_equal_one_process",
)

mutant(
    "hybrid_norm_counts_copies",
    "Runs with a pipeline clip harder: a tied embedding counts in the norm once for each stage that has it.",
    target="hybrid_parallel.stages.PipelineStages.counted_elsewhere",
    changes={"self.later_copies() | self.layers.counted_elsewhere()": "self.layers.counted_elsewhere()"},
    killer=EQUIVALENCE + "test_pipelines_of_divided_layers_equal_one_process",
)

mutant(
    "hybrid_positions_of_own_tokens",
    (
        "Every rank looks up positions 0, 1, ... for its tokens: a pre-hook that returns nothing "
        "changes nothing."
    ),
    target="hybrid_parallel.context_axis.ContextAxis._at_own_positions",
    changes={
        "return (self._positions.to(positions_t.device)[positions_t],)": (
            "args = (self._positions.to(positions_t.device)[positions_t],)"
        ),
    },
    killer=EQUIVALENCE + "test_cut_sequences_beside_divided_layers_equal_one_process",
    symptom="With a context axis the loss is not that of one process, from the first step on.",
)

mutant(
    "hybrid_replicas_draw_alike",
    "More replicas help less than they should: all draw the same dropout masks.",
    target="hybrid_parallel.mesh.stream_of",
    changes={"rank // sizes.tensor": "rank // (sizes.tensor * sizes.replicas)"},
    killer=MESH + "test_replicas_and_stages_draw_masks_of_their_own",
)

mutant(
    "hybrid_terms_lost_beside_zero",
    (
        "With ZeRO norms drift apart: their terms are added up in gradients that ZeRO has already "
        "taken and sent."
    ),
    target="hybrid_parallel.hybrid.HybridParallel.finish_gradient_sync",
    changes={
        "for axis in (self.stages, self.data, self.layers):": (
            "axes = (self.stages, self.data) if self.sizes.zero else (self.stages, self.data, self.layers)\n"
            "for axis in axes:"
        ),
    },
    killer=EQUIVALENCE + "test_divided_tokens_and_gradients_in_shards_equal_one_process",
)

mutant(
    "hybrid_tied_embedding_over_the_wrong_axis",
    "The first and the last stage train different embeddings: the sum is taken over the replicas.",
    target="hybrid_parallel.hybrid.HybridParallel.finish_gradient_sync",
    changes={
        "for axis in (self.stages, self.data, self.layers):": (
            "if self.pipeline is not None:\n"
            "    for parameter, _ in self.pipeline.tied:\n"
            '        all_reduce(parameter.grad, op="mean", group=self.mesh.replicas)\n'
            "    self.pipeline._is_complete = True\n"
            "for axis in (self.data, self.layers):"
        ),
    },
    killer=EQUIVALENCE + "test_a_tied_embedding_gets_the_sum_of_both_stages",
)

mutant(
    "planner_holds_the_batch_at_once",
    "The planner asks for too many devices: each microbatch counts as large as a replica's batch.",
    target="hybrid_parallel.planner.memory.tokens_of",
    changes={"(sizes.data * sizes.microbatches)": "sizes.data"},
    killer=PLANNER + "test_microbatches_divide_what_a_step_holds_without_a_pipeline",
)

mutant(
    "planner_recomputes_for_free",
    "The planner always recomputes: the second forward saves memory, and its time is not counted.",
    target="hybrid_parallel.planner.step_time.TimeModel.layer",
    changes={" + sizes.recompute * forward[cause]": ""},
    killer=PLANNER + "test_recomputation_adds_a_third_to_the_layers",
)
