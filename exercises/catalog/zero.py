"""Exercises of lesson 2, third part: ZeRO divides optimizer state, gradients and parameters."""

from exercises.catalog.exercise import Exercise

ONE_PROCESS = "tests/zero/test_zero_equals_one_process.py::"
KILLERS = "tests/zero/test_zero_mutant_killers.py::"
MEMORY = "tests/zero/test_zero_memory.py::"
COSTS = "tests/zero/test_zero_costs.py::"

EXERCISES = (
    Exercise(
        name="memory_formulas",
        title="The memory of each stage",
        notebook="06_zero_and_fsdp",
        target="zero.memory.formula",
        also=("zero.memory.of_one_process", "zero.memory.owned"),
        tests=(
            MEMORY + "test_the_formula_gives_the_gigabytes_of_the_papers_figure_1",
            MEMORY + "test_a_stage_that_does_not_exist_is_refused",
            MEMORY + "test_shards_add_up_to_the_formula_and_padding_makes_them_equal",
        ),
        difficulty=1,
        minutes=20,
        doc="""
            Return what one of `ranks` ranks holds by formula, if one process holds `full`.

            Held has three fields, in bytes: `parameters`, `gradients` and `optimizer_state`. Stage 0 is plain
            data parallel. Stage 1 divides the optimizer's state among the ranks, stage 2 also the gradients,
            and stage 3 also the parameters. The quotients may be fractions. For another stage raise
            WorkbookError with the text "ZeRO has the stages 1, 2 and 3, and 0 is without it; there is no
            stage {stage}." FORMULAS has an entry for each stage that exists.
        """,
        docs={
            "of_one_process": """
                Return the bytes that one process holds.

                Each share describes some parameters: `full` is how many numbers they have, `itemsize` the
                bytes of one, and `trained` tells whether they have gradients. The optimizer keeps `states`
                numbers for each number of a trained parameter, of the same itemsize.
            """,
            "owned": """
                Return what this rank should hold, to the byte, without padding.

                Of each share this rank owns `mine` numbers. What a stage does not divide, every rank holds in
                full.
            """,
        },
        hints=(
            "Each stage divides one kind of tensor more. Which stages divide the gradients: only 2, or 2 "
            "and 3?",
            "Frozen parameters have neither gradients nor optimizer state, but they take memory. Add up the "
            "bytes of all shares for the parameters, and those of trained shares for the rest.",
            "owned is formula with the numbers that this rank really owns in place of an n-th: add up "
            "share.mine * share.itemsize. The optimizer's state is `states` times the bytes of the trained "
            "numbers.",
        ),
    ),
    Exercise(
        name="zero_pieces",
        title="A rank's piece of each parameter",
        notebook="06_zero_and_fsdp",
        target="data_parallel.flat.Flat.pieces",
        tests=(
            ONE_PROCESS + "test_zero1_equals_one_process",
            KILLERS + "test_every_number_of_every_parameter_is_in_one_ranks_shard",
            "tests/zero/test_zero.py::test_a_parameter_may_have_fewer_numbers_than_there_are_ranks",
            "tests/data_parallel/test_flat.py::test_a_shard_may_begin_and_end_in_the_middle_of_parameters",
        ),
        difficulty=3,
        minutes=30,
        needs=("memory_formulas",),
        doc="""
            Return for each parameter at which element its piece starts, and the piece, a view of `shard`.

            The parameters, with `self._sizes` numbers each, stand one after the other in a flat tensor.
            `self.mine`, a slice, is the part of the flat tensor that this rank's `shard` holds. If a
            parameter is not in the shard, its piece is empty, and starts at 0.
        """,
        hints=(
            "A piece is where two ranges of the flat tensor overlap: that of a parameter, from its offset "
            "to offset + size, and that of the shard, from self.mine.start to self.mine.stop.",
            "Two ranges overlap from the larger of the two beginnings to the smaller of the two ends. If "
            "that end is not after that beginning, the piece is empty: shard[:0].",
            "With begin and end in the flat tensor, the piece is shard[begin - self.mine.start : end - "
            "self.mine.start], and it starts at element begin - offset of its parameter. Then add the size "
            "to the offset.",
        ),
    ),
    Exercise(
        name="zero1",
        title="ZeRO 1: an n-th of the optimizer",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero1.ZeroOptimizer._reduce_scatter",
        also=(
            "zero.train_zero1.ZeroOptimizer.step",
            "zero.train_zero1.ZeroOptimizer.gather_parameters",
        ),
        tests=(
            ONE_PROCESS + "test_zero1_equals_one_process",
            KILLERS + "test_a_gradient_is_the_mean_over_ranks_not_their_sum",
            KILLERS + "test_after_a_step_all_ranks_compute_with_the_new_parameters",
            COSTS + "test_stages_1_2_and_3_send_2_2_and_3_times_the_parameters[2]",
            "tests/zero/test_sharded_loops.py::test_a_step_runs_its_closure_and_synchronises_gradients",
        ),
        difficulty=3,
        minutes=35,
        beyond="bytes of zero1",
        needs=("zero_pieces", "bucket_launch"),
        doc="""
            Start the reduce-scatter of a complete bucket: this rank's shard becomes the mean over ranks.

            `self._gradients[bucket]` is the flat tensor of the bucket's gradients, and the slice
            `bucket.flat.mine` of it this rank's shard. Use `self.group` and `self.pattern`, and append the
            handle to `self._in_flight`: the backward must go on.
        """,
        docs={
            "step": """
                Update this rank's shard of the parameters, and gather the shards of all ranks.

                Return what `closure`, if there is one, returns: it computes the gradients. If not
                `self._steps.is_synced`, call `self.finish_gradient_sync()`. Then call `self._before_step()`,
                which refuses wrong use, and step with `self.inner`, an ordinary optimizer of this rank's
                shard.
            """,
            "gather_parameters": """
                Collect the shards of all ranks in `bucket.full`, for all of `self.buckets`, on every rank.

                `bucket.shard` is this rank's part of `bucket.full`, in the same memory.
            """,
        },
        objects={"bucket": "data_parallel.flat.ParameterBucket"},
        hints=(
            "reduce_scatter(shard, full, op, group, async_op, pattern) writes this rank's part of the "
            "reduction to `shard`, which may be a view of `full`. all_gather(full, shard, ...) is its "
            "counterpart.",
            "In plain data parallel each rank takes the same step with all gradients. Here each takes a "
            "part of the step. What is missing before the next forward, if each rank has updated only its "
            "own shard?",
            "step: closure, finish_gradient_sync if needed, _before_step, self.inner.step(), "
            "gather_parameters. To let the messages of several buckets overlap, start all all-gathers with "
            "async_op=True before waiting.",
        ),
    ),
    Exercise(
        name="zero2",
        title="ZeRO 2: gradients freed as they leave",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero2.ZeroGradientOptimizer._reduce_scatter",
        also=(
            "zero.train_zero2.ZeroGradientOptimizer._view",
            "zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
        ),
        tests=(
            ONE_PROCESS + "test_zero2_equals_one_process",
            KILLERS + "test_the_gradients_of_all_microbatches_add_up_in_the_shards",
            KILLERS + "test_stage_2_keeps_only_its_shard_of_the_gradient",
            KILLERS + "test_at_most_three_buckets_of_gradients_are_alive",
            "tests/zero/test_zero.py::test_a_parameter_may_have_fewer_numbers_than_there_are_ranks",
        ),
        difficulty=4,
        minutes=45,
        beyond="bytes of zero2",
        needs=("zero1",),
        doc="""
            Start to reduce-scatter a complete bucket, when fewer than MOST_IN_FLIGHT are in flight.

            `self._filling` has the flat tensor of each bucket that misses a gradient: take this bucket's out
            of it. The shard has `bucket.flat.shard_numel` numbers, in memory of its own. Append (bucket,
            full, shard, handle) to the deque `self._in_flight`.
        """,
        docs={
            "_view": """
                Return the parameter's place in its bucket, which gets memory with its first gradient.

                `self._bucket[parameter]` is its bucket, and `bucket.flat.views(full)` returns the views of
                all `bucket.flat.parameters` in a flat tensor that is like `bucket.full`. The last
                `bucket.flat.padding` numbers of it must be zero. Keep the tensor in `self._filling` and the
                views in `self._views`, each until it is used.
            """,
            "_wait_for_oldest": """
                Wait for the oldest reduce-scatter, and add its shard to that of earlier microbatches.

                `self._shards[bucket]` is what this rank keeps of the bucket's gradients.
            """,
        },
        objects={"bucket": "data_parallel.flat.ParameterBucket"},
        hints=(
            "A tensor's memory is freed when nothing refers to it: no dict, no deque, no view. So whatever "
            "refers to a full bucket has to be taken out of its container: pop, popleft.",
            "Wait for the oldest one, in a loop, while two are in flight; then launch. If the shard were a "
            "view of the full bucket, as in stage 1, keeping the shard would keep the full bucket.",
            "_view: if the bucket is not in self._filling, make its tensor with torch.empty_like, zero the "
            "padding, and put the view of each of its parameters into self._views. Return "
            "self._views.pop(parameter).",
        ),
    ),
    Exercise(
        name="zero3",
        title="ZeRO 3: gather, use, free",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero3.Unit.start_gather",
        also=(
            "zero.train_zero3.Unit.gather",
            "zero.train_zero3.Unit.free",
            "zero.train_zero3.FullyShardedDataParallel._before_forward",
        ),
        tests=(
            ONE_PROCESS + "test_zero3_equals_one_process",
            KILLERS + "test_a_block_is_gathered_during_its_forward_and_its_backward",
            KILLERS + "test_the_next_block_is_gathered_while_one_computes",
            COSTS + "test_stages_1_2_and_3_send_2_2_and_3_times_the_parameters[2]",
            COSTS + "test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else",
        ),
        difficulty=4,
        minutes=45,
        beyond="bytes of zero3",
        needs=("zero2",),
        doc="""
            Start to gather the parameters, unless that has been done: `self.full` is None if it has not.

            Note the shard's version, `self.shard._version`, in `self._version`. `self.full` becomes a flat
            tensor of `self.flat.numel` numbers of `self.dtype` on the shard's device. This rank's part of it
            is the slice `self.flat.mine`. The handle goes into `self._gathering`; nothing waits here.
        """,
        docs={
            "gather": """
                Return when all of `full` is there, and the module's parameters are views of it.

                `self._wait_for_gather()` waits for the handle, and sets `self._gathering` to None.
                `self._show()` makes the parameters views of `full`. A unit that is full already is left as it
                is.
            """,
            "free": """
                Free the memory of the full parameters.

                `self._hide()` ends what `self._show()` began: then no parameter refers to `full`. A unit may
                also have been prefetched and not used, and then its memory must not be freed before the
                message has arrived.
            """,
            "_before_forward": """
                Wait for the block's parameters, and prefetch those of the next block.

                A backward that recomputes activations comes here, too: if is_in_a_backward(), call
                `block.gather()`, and nothing else. Otherwise call `self._begin_turn(block)` first.
                `self._seen` is the list of blocks that this forward has run, with this one from now on, and
                `self._order` that of the forward before. As long as the two agree, the next block is known:
                call its `start_gather()`.
            """,
        },
        hints=(
            "A unit has three states: freed (full is None), on its way (there is a handle in _gathering), "
            "and full. Which calls lead from one to the next, and which of them may be called in any state?",
            "start_gather copies the shard into this rank's part of `full`, and then calls "
            "all_gather(self.full, that part, ..., async_op=True). A prefetch is a start_gather without a "
            "wait; gather calls it first, in case nothing has been prefetched.",
            "gather: start_gather, and if there is a handle, wait and show. free: if there is a handle, "
            "wait; otherwise, if full is not None, hide. In all cases set full to None. In _before_forward, "
            "the next block is self._order[len(self._seen)], if the lists agree and there is one.",
        ),
    ),
)
