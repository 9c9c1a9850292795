"""Exercises of lesson 5: which ranks form which group, and what is completed in which."""

from exercises.catalog.exercise import Exercise

MESH = "tests/hybrid_parallel/test_mesh.py::"
ONE_PROCESS = "tests/hybrid_parallel/test_equivalence.py::"

EXERCISES = (
    Exercise(
        name="mesh",
        title="Laying out the mesh",
        notebook="09_everything_on_one_mesh",
        target="hybrid_parallel.mesh.coordinates_of",
        also=("hybrid_parallel.mesh.groups_of",),
        tests=(
            MESH + "test_neighbours_are_in_one_tensor_group_and_stages_are_the_farthest_apart",
            MESH + "test_each_rank_is_in_one_group_of_an_axis_at_its_place[pipeline]",
            MESH + "test_each_rank_is_in_one_group_of_an_axis_at_its_place[data]",
            MESH + "test_each_rank_is_in_one_group_of_an_axis_at_its_place[context]",
            MESH + "test_each_rank_is_in_one_group_of_an_axis_at_its_place[tensor]",
            MESH + "test_torchs_own_device_mesh_has_the_same_groups",
            ONE_PROCESS + "test_a_tied_embedding_gets_the_sum_of_both_stages",
        ),
        difficulty=1,
        minutes=20,
        doc="""
            Return a rank's place along each axis, from 0, as a dictionary.

            Its keys are "pipeline", "data", "context" and "tensor". The ranks of a tensor group are
            neighbours, because they send the most, and a launcher numbers the ranks of one machine one after
            the other. After them come the ranks with other tokens of the same examples (context), then those
            with other examples (data), and then the next stage. With 2 x 2 x 1 x 2 ranks, rank 5 has the
            places {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}.
        """,
        helps=(
            "sizes.pipeline, sizes.data, sizes.context, sizes.tensor: int\n    "
            "How many places each axis has.",
            "sizes.world_size: int\n    The number of ranks: the product of the axes.",
        ),
        hints=(
            "Think of a clock: hours, minutes, seconds. The place along the tensor axis changes with every "
            "rank, the place along the context axis each time that the tensor axis begins again, and so on.",
            "divmod(rank, sizes.tensor) gives the number of complete tensor groups before this rank, and the "
            "place in its own. Do the same with the first number and sizes.context, then with sizes.data.",
            "groups_of: go through all ranks in order, and collect in a dictionary the ranks that have the "
            "same places along all other axes. Its values are the groups, already in the right order.",
        ),
    ),
    Exercise(
        name="complete_gradients",
        title="Completing the gradients of a step",
        notebook="09_everything_on_one_mesh",
        target="hybrid_parallel.hybrid.HybridParallel.finish_gradient_sync",
        tests=(
            ONE_PROCESS + "test_a_tied_embedding_gets_the_sum_of_both_stages",
            ONE_PROCESS + "test_pipelines_of_replicas_equal_one_process",
            ONE_PROCESS + "test_replicas_of_divided_tokens_equal_one_process",
            ONE_PROCESS + "test_divided_tokens_and_gradients_in_shards_equal_one_process",
        ),
        difficulty=2,
        minutes=20,
        needs=("mesh",),
        doc="""
            Complete the gradients of the backwards: over stages, over replicas, over tensor ranks.

            With ZeRO, a rank has only its shard of a gradient after the mean over replicas, so the order of
            the three matters.
        """,
        helps=(
            "self.stages: OneStage | PipelineStages\n    "
            "The stages of this rank, one of which may share an embedding with another rank.",
            "self.data: nn.Module\n    The replicas, which differ along the data and context axes.",
            "self.layers: ModelOnRank\n    The ranks of the tensor axis.",
            "each.finish_gradient_sync()\n    "
            "Complete the gradients in this axis; where it has one rank, do nothing.",
        ),
        hints=(
            "After the backwards, a gradient may lack three things: the term of the other stage that has the "
            "same embedding, the terms of other ranks of the tensor group, and the mean over replicas.",
            "Each object completes the gradients in its own group. "
            "All three are sums, so without ZeRO any order is right. With ZeRO a rank has only its shard of "
            "a gradient after the mean over replicas: which of the others needs the full gradient?",
            "The terms of the tensor group come last: with ZeRO they are added up in the shards that "
            "self.data.finish_gradient_sync() leaves. The embedding comes first, because stages that share "
            "it have other shards.",
        ),
    ),
    Exercise(
        name="clip_on_a_mesh",
        title="Clipping on a mesh",
        notebook="09_everything_on_one_mesh",
        target="hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_",
        tests=(
            ONE_PROCESS + "test_pipelines_of_divided_layers_equal_one_process",
            ONE_PROCESS + "test_replicas_of_divided_layers_equal_one_process",
            ONE_PROCESS + "test_divided_layers_in_shards_of_zero_3_equal_one_process",
        ),
        difficulty=3,
        minutes=20,
        needs=("complete_gradients",),
        doc="""
            Do what torch's clip_grad_norm_ does on the full model, in which every number counts once.

            Return the norm before the gradients are scaled.
        """,
        helps=(
            "clipping.clip_grad_norm_(parameters, max_norm, groups, norm_type, uncounted, self.device)\n    "
            "Scale gradients by their norm: squares of all but the `uncounted` parameters add up over one "
            "group after the other.",
            "self.trained_parameters() -> dict[nn.Parameter, nn.Parameter]\n    "
            "What this rank trains of each parameter of its stages: with ZeRO its shard, else the parameter.",
            "self.stages.counted_elsewhere() -> set[nn.Parameter]\n    "
            "The parameters that another stage, tensor rank or expert rank has, too, and counts.",
            "self.stages.norm_groups: list[Group]\n    The groups of pipeline, tensor axis and experts.",
            "self.mesh.replicas: Group, self.sizes.zero: int\n    The replicas, and the stage of ZeRO.",
        ),
        hints=(
            "The norm is the root of the sum of all squares, and a sum may be computed in parts: each rank "
            "adds the squares that it alone has, and the ranks add up these sums. So which of two ranks with "
            "the same gradient counts it? Any, but only one of them.",
            "Replicas have the same gradients, so their sums must not be added up. But with ZeRO each has "
            "other shards.",
            "Clip the values of self.trained_parameters(): with ZeRO its keys have no gradient. `uncounted` "
            "are the values of those keys that are counted elsewhere. The groups are "
            "self.stages.norm_groups, and with ZeRO also self.mesh.replicas.",
        ),
    ),
)
