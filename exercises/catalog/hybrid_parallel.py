"""Exercises of lesson 5: which ranks form which group, what is completed in which, and what a plan costs."""

from exercises.catalog.exercise import Exercise

MESH = "tests/hybrid_parallel/test_mesh.py::"
ONE_PROCESS = "tests/hybrid_parallel/test_equivalence.py::"
CLIPPING = "tests/hybrid_parallel/test_clipping.py::"
MEMORY = "tests/hybrid_parallel/test_planner_memory.py::"
PLANNER = "tests/hybrid_parallel/test_planner.py::"

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
            with other examples (data), and then the next stage. `sizes.pipeline`, `sizes.data`,
            `sizes.context` and `sizes.tensor` are the numbers of places. With 2 x 2 x 1 x 2 ranks, rank 5 has
            the places {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}.
        """,
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

            `self.pipeline`, `self.data` and `self.terms` are objects of lessons 4, 2 and 3, or None where
            there is nothing to complete. Their method `finish_gradient_sync()` completes the gradients: over
            the stages of a pipeline, over the replicas, which differ along the data and context axes, and
            over the ranks of the tensor axis. With ZeRO, `self.data` leaves this rank's shard of a gradient
            only, so the order of the three matters.
        """,
        hints=(
            "After the backwards, a gradient may lack three things: the term of the other stage that has the "
            "same embedding, the terms of other ranks of the tensor group, and the mean over replicas.",
            "Each class completes the gradients in its own group. A class that is None has nothing to do. "
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
        target="hybrid_parallel.clipping.counted_elsewhere",
        also=("hybrid_parallel.clipping.clip_over",),
        tests=(
            CLIPPING + "test_the_norm_of_a_rank_without_gradients_is_that_of_all",
            ONE_PROCESS + "test_pipelines_of_divided_layers_equal_one_process",
            ONE_PROCESS + "test_replicas_of_divided_layers_equal_one_process",
            ONE_PROCESS + "test_divided_layers_in_shards_of_zero_3_equal_one_process",
        ),
        difficulty=3,
        minutes=35,
        needs=("complete_gradients",),
        doc="""
            Return the parameters of this rank whose gradients another rank of its replica counts.

            `pipeline` and `tensor` are None for an axis of one rank. The keys of `tensor.dims` are the names
            of the parameters that the ranks of `tensor.group` divide; of all others each of these ranks has
            the full gradient. `tensor.module.named_parameters(remove_duplicate=False)` gives this rank's
            names and parameters. `pipeline.later_copies()` returns the parameters that an earlier stage also
            has.
        """,
        docs={
            "clip_over": """
                Scale the gradients so that their norm over all ranks of the axes is at most `max_norm`.

                `gradients` has pairs of a parameter and what this rank holds of its gradient, or None. The
                gradients of `uncounted` parameters are scaled, and do not count in the norm. `axes` are the
                groups over which the squares are added up, along one axis after the other. All ranks take
                part, also one that has no gradient: it adds zero, on `device`. Return the norm before the
                scaling, in float64. The gradients are multiplied by max_norm / (norm + 1e-6), but never by
                more than 1, in place: `gradient.as_subclass(Tensor).mul_(scale)`.
            """,
        },
        hints=(
            "The norm is the root of the sum of all squares, and a sum may be computed in parts: each rank "
            "adds the squares that it alone has, and the ranks add up these sums. So which of two ranks with "
            "the same gradient counts it? Any, but only one of them.",
            "counted_elsewhere: the later copies of the pipeline, and on each rank of the tensor group but "
            "the first (dist.get_rank(tensor.group)) all parameters whose names are not in tensor.dims.",
            "clip_over: start from torch.zeros((), dtype=torch.float64, device=device), add sum_of_squares("
            "gradient.as_subclass(Tensor)) of each counted gradient, and all_reduce this one number along "
            "each axis in turn, with group=axis and pattern=pattern. Then take the root, and scale.",
        ),
    ),
    Exercise(
        name="memory_model",
        title="The memory of a rank",
        notebook="09_everything_on_one_mesh",
        target="hybrid_parallel.planner.memory.memory_of_rank",
        tests=(
            MEMORY + "test_the_state_of_a_rank_is_the_papers_table[1]",
            MEMORY + "test_microbatches_divide_what_a_step_holds_without_a_pipeline",
            MEMORY + "test_the_activations_of_a_pipeline_are_those_that_the_simulator_counts[1f1b]",
            MEMORY + "test_the_activations_of_a_pipeline_are_those_that_the_simulator_counts[interleaved]",
            MEMORY + "test_recomputation_keeps_the_input_of_each_layer_and_one_layer_more",
            MEMORY + "test_a_vocabulary_counts_on_the_rank_with_the_head_alone",
            MEMORY + "test_sequence_parallelism_divides_the_final_norm_and_the_input_of_each_layer",
            MEMORY + "test_zero_3_holds_the_parameters_of_two_layers_and_the_gradients_of_one_for_a_time",
            MEMORY + "test_a_context_axis_divides_tokens_and_state",
            MEMORY
            + "test_predicted_activations_are_within_1_percent_of_what_a_forward_holds_at_its_end[small]",
        ),
        difficulty=4,
        minutes=50,
        needs=("memory_formulas", "pipeline_1f1b"),
        doc="""
            Return what the ranks at place `rank` of the pipeline hold at their peak.

            `batch` is the number of examples in a step over all ranks. ZeRO divides among all replicas: the
            ranks of the context axis, which cut sequences, hold the same parameters, too. `autocast` is for
            state_bytes. Return a `Memory` with the bytes of the following fields, and leave `in_flight` and
            `deferred` at 0, because other functions add them:

                parameters, gradients,     parameters_of the rank, each with the three sizes of state_bytes in
                optimizer_state            this order, divided by ZeRO (`stage` of `formula` is that of ZeRO)
                activations                of each layer of the rank, for each microbatch that is held.
                                           theory.held counts a microbatch once for each stage that holds it,
                                           and each stage of the rank has an equal part of the rank's layers
                temporary                  the sum of these. Recomputation: the activations of one layer, in a
                                           pipeline of the layers of one stage. The rank with the head: for
                                           each token the numbers of the final norm in the precision, and the
                                           logits twice, in the precision and in float32. ZeRO 3: the
                                           parameters of two layers, and the gradients of one

            `layer_activations` is already divided by the tensor axis, and does not know of recomputation.
            With recomputation only the input of each layer is kept, or in a pipeline that of each stage:
            shape.width numbers for each token in the precision. Sequence parallelism divides that input and
            the final norm among the ranks of the tensor axis. The tensor axis always divides the logits and
            the layer's parameters; `shape.last_numbers` and `shape.layer_parameters` are not divided yet.
        """,
        hints=(
            "Begin with the state: the number of parameters of the rank times each of the three sizes of "
            "state_bytes makes a Held, and `formula` of the ZeRO lesson divides it. Then take "
            "tokens_of a microbatch.",
            "Activations: bytes of a token in a layer, times tokens, times layers, times microbatches that "
            "are held. A rank with several stages holds theory.held of them, each with its part of the "
            "rank's layers: sizes.num_stages // sizes.pipeline is the number of stages.",
            "Recompute: what a layer keeps moves to `temporary`, once, and in its place tokens * shape.width "
            "* ITEMSIZE stays for each layer. In a pipeline take a stage for the layer. Head (has_head): "
            "with norm, logits = shape.last_numbers and c the ITEMSIZE, tokens * (norm * c + logits / "
            "sizes.tensor * (c + 4)); sequence parallelism divides norm * c. ZeRO 3: shape.layer_parameters "
            "/ sizes.tensor times (2 parameters + 1 gradient).",
        ),
    ),
    Exercise(
        name="choose_a_plan",
        title="Choosing a plan",
        notebook="09_everything_on_one_mesh",
        target="hybrid_parallel.planner.search.plans",
        also=("hybrid_parallel.planner.search.choose",),
        tests=(
            PLANNER + "test_plans_come_in_order_and_those_that_do_not_fit_at_the_end",
            PLANNER + "test_less_memory_makes_plans_that_hold_less",
            PLANNER + "test_of_equally_fast_plans_the_one_with_larger_microbatches_and_less_memory_is_first",
            PLANNER + "test_a_reason_names_what_differs",
            PLANNER + "test_no_plan_fits_is_said_with_the_smallest_need",
        ),
        difficulty=3,
        minutes=40,
        needs=("memory_model",),
        doc="""
            Return all plans: the best one first, and at the end those that do not fit, the smallest first.

            `batch` is the number of examples in a step, over all devices together. `given` are fields of
            ParallelSizes that must stay as they are. `candidates` needs them as one dictionary together with
            the precision; a precision in `given` counts more than the argument. Raise WorkbookError with "The
            number of {what} is {number}" if there are less than one `devices` or `examples in a step`. A plan
            is a Plan(sizes, memory, seconds). It fits if the fullest rank needs at most USABLE times
            machine.device.memory_bytes; else its seconds are None. Raise WorkbookError ("No division of
            {devices} devices makes sense ...") if there is no plan at all.

            `compared_seconds` of a plan are those of its step, or infinity if it does not fit. Of equally
            fast plans the one with fewer microbatches comes first, and then the one with less memory. Only
            memory decides the order of plans that do not fit. In the end each plan gets the reason that
            `reason_of` finds for it.
        """,
        docs={
            "choose": """
                Return the best plan. WorkbookError if none fits into `memory_bytes` of a device.

                `found` is what `plans` returns for a device with `memory_bytes`: a plan fits if it has
                seconds. The message has the form "No plan fits: the smallest one needs {} per device, ...",
                with a size by show_bytes.
            """,
        },
        hints=(
            "For each of the candidates predict the memory. Whether you need its time depends on that.",
            "Sort by a tuple: Python compares its first numbers, and the next ones only where these are "
            "equal.",
            "key=lambda p: (p.compared_seconds, p.sizes.microbatches * (p.seconds is not None), "
            "p.memory_bytes). A Plan is frozen, so use dataclasses.replace(plan, "
            "reason=reason_of(plan, found[0], usable)). choose needs to look at found[0] only.",
        ),
    ),
)
