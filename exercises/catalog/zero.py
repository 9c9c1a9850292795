"""Exercises of lesson 2, second part: ZeRO divides optimizer state, gradients and parameters."""

from exercises.catalog.exercise import Exercise

ONE_PROCESS = "tests/zero/test_narrated.py::"
KILLERS = "tests/zero/test_equality.py::"
MEMORY = "tests/zero/test_memory.py::"
COSTS = "tests/zero/test_costs.py::"
WORK = ("work.wait()\n    Block until the operation has ended.",)

EXERCISES = (
    Exercise(
        name="memory_formulas",
        title="The memory of each stage",
        notebook="06_zero_and_fsdp",
        target="zero.memory.formula",
        also=("zero.memory.of_one_process", "zero.memory.owned"),
        tests=(
            MEMORY + "test_the_formula_gives_the_gigabytes_of_the_papers_figure_1",
            MEMORY + "test_shards_add_up_to_the_formula_and_padding_makes_them_equal",
        ),
        difficulty=1,
        minutes=20,
        doc="""
            Return what one of `ranks` ranks holds by formula, if one process holds `full`.

            Held has three fields, in bytes: `parameters`, `gradients` and `optimizer_state`. Stage 0 is
            plain data parallel. Stage 1 divides the optimizer's state among the ranks, stage 2 also the
            gradients, and stage 3 also the parameters. The quotients may be fractions.
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

                Of each share this rank owns `mine` numbers. What a stage does not divide, every rank holds
                in full.
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
        name="zero_shards",
        title="A rank's shard of each parameter",
        notebook="06_zero_and_fsdp",
        target="zero.shards.FlatLayout.split",
        tests=(
            ONE_PROCESS + "test_zero1_equals_one_process",
            KILLERS + "test_every_number_of_every_parameter_is_in_one_ranks_shard",
            KILLERS + "test_a_parameter_may_have_fewer_numbers_than_there_are_ranks",
        ),
        difficulty=3,
        minutes=30,
        needs=("memory_formulas",),
        doc="""
            Return for each parameter at which element this rank's shard of it starts, and a view of it.

            The parameters, with `self.sizes` numbers each, stand one after the other in a flat tensor.
            `shard` is this rank's part of it, which the slice `self.mine` of the flat tensor is. If a
            parameter is not in this rank's part, the view is empty, and starts at 0.
        """,
        hints=(
            "A rank's shard of a parameter is where two ranges of the flat tensor overlap: that of the "
            "parameter, from its offset to offset + size, and from self.mine.start to self.mine.stop.",
            "Two ranges overlap from the larger of the two beginnings to the smaller of the two ends. If "
            "that end is not after that beginning, the view is empty: shard[:0].",
            "With begin and end in the flat tensor, the view is shard[begin - self.mine.start : end - "
            "self.mine.start], and it starts at element begin - offset of its parameter. Then add the size "
            "to the offset.",
        ),
    ),
    Exercise(
        name="zero1",
        title="ZeRO 1: an n-th of the optimizer",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero1.ZeroOptimizer._launch",
        also=(
            "zero.train_zero1.ZeroOptimizer.step",
            "zero.train_zero1.ZeroOptimizer.gather_parameters",
        ),
        tests=(
            ONE_PROCESS + "test_zero1_equals_one_process",
            KILLERS + "test_a_gradient_is_the_mean_over_ranks_not_their_sum",
            KILLERS + "test_after_a_step_all_ranks_compute_with_the_new_parameters",
            COSTS + "test_the_stages_send_2_2_and_nearly_3_times_the_parameters[2]",
        ),
        difficulty=3,
        minutes=35,
        beyond="bytes of zero1",
        needs=("zero_shards", "bucket_launch"),
        doc="""
            Start the reduce-scatter of a complete bucket: this rank's part of it becomes the mean over
            ranks.

            `bucket.gradients` is the flat tensor of the bucket's gradients, and the slice
            `bucket.layout.mine` of it this rank's part. Use `self.group` and `self.pattern`, and append
            (bucket, handle) to `self._in_flight`: the backward must go on.
        """,
        docs={
            "step": """
                Update this rank's shard of the parameters, and gather the shards of all ranks.

                First call `self._guard.before_step()`, which refuses wrong use. `self.inner` is an ordinary
                optimizer of this rank's shards.
            """,
            "gather_parameters": """
                Collect the shards of all ranks in `bucket.full`, for all of `self.buckets`, on every rank.

                The slice `bucket.layout.mine` of `bucket.full` is this rank's shard.
            """,
        },
        helps=WORK,
        hints=(
            "reduce_scatter(shard, full, op, group, async_op, pattern) writes this rank's part of the "
            "reduction to `shard`, which may be a view of `full`. all_gather(full, shard, ...) is its "
            "counterpart.",
            "In plain data parallel each rank takes the same step with all gradients. Here each takes a "
            "part of the step. What is missing before the next forward, if each rank has updated only its "
            "own shard?",
            "step: before_step, self.inner.step(), gather_parameters. To let the messages of several buckets "
            "overlap, start all all-gathers with async_op=True before waiting.",
        ),
    ),
    Exercise(
        name="zero2",
        title="ZeRO 2: gradients freed as they leave",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero2.ZeroGradientOptimizer._launch",
        also=(
            "zero.train_zero2.ZeroGradientOptimizer._move_in",
            "zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
        ),
        tests=(
            ONE_PROCESS + "test_zero2_equals_one_process",
            KILLERS + "test_the_gradients_of_all_microbatches_add_up_in_the_shards",
            COSTS + "test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else",
            COSTS + "test_at_most_three_buckets_of_gradients_are_alive",
            KILLERS + "test_a_parameter_may_have_fewer_numbers_than_there_are_ranks",
        ),
        difficulty=4,
        minutes=45,
        beyond="bytes of zero2",
        needs=("zero1",),
        doc="""
            Start the reduce-scatter of a bucket, when fewer than MOST_IN_FLIGHT are in flight.

            `self._in_flight` is the deque of those that are. Stage 1's method does the rest:
            `ZeroOptimizer._launch(self, bucket)`.
        """,
        docs={
            "_move_in": """
                Copy a gradient into its bucket, which gets memory with its first gradient.

                The storage of `bucket.gradients` has a size of 0 while it is freed, and
                `bucket.gradients.nbytes` when it has memory. The last `bucket.layout.padding` of its
                `bucket.layout.numel` numbers must be zero. Then stage 1's method does the rest:
                `ZeroOptimizer._move_in(self, parameter, bucket)`.
            """,
            "_wait_for_oldest": """
                Wait for the oldest reduce-scatter, keep this rank's part of it, and free the memory.

                `self._in_flight` has pairs (bucket, handle). After the wait the slice `bucket.layout.mine`
                of `bucket.gradients` is the mean over ranks. `bucket.layout.add_gradient(bucket.shards,
                gradient)` gives each of the bucket's shards its part of it, or adds it to that of earlier
                microbatches.
            """,
        },
        hints=(
            "A storage is tensor.untyped_storage(); size() is its size in bytes, and resize_(n) gives it n "
            "bytes. Tensors and views that use the storage stay as they are.",
            "_launch: while as many as MOST_IN_FLIGHT are in flight, wait for the oldest. If what is kept "
            "were a view of `bucket.gradients`, its memory would be freed, too: clone it.",
            "_wait_for_oldest: popleft, wait, add_gradient with a clone of this rank's part, then "
            "bucket.gradients.untyped_storage().resize_(0).",
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
            KILLERS + "test_after_a_step_all_ranks_compute_with_the_new_parameters",
            KILLERS + "test_the_next_block_is_gathered_while_one_computes",
            COSTS + "test_the_stages_send_2_2_and_nearly_3_times_the_parameters[2]",
            COSTS + "test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else",
            "tests/zero/test_refusals.py::test_ranks_that_run_different_blocks_are_refused_on_all_ranks",
        ),
        difficulty=4,
        minutes=45,
        beyond="bytes of zero3",
        needs=("zero2",),
        doc="""
            Start to gather the parameters, unless that has been done: nothing waits here.

            `self.full`, a flat tensor, has a storage of size 0 while it is freed (`self.is_freed`), and of
            `self.full.nbytes` otherwise. This rank's part of it is the slice `self.layout.mine`, and
            `self.shard` has the values. Give all_gather `unit=self.number`: ranks that gather different
            units are then refused. The handle goes into `self._gathering`. Note in
            `self._gathered_version` which version of the shard was gathered, `self.shard._version`. If it is
            not freed and `self.is_stale`, free it first: an optimizer step has changed the shard since.
        """,
        docs={
            "gather": """
                Return when all of `full` is there, and the module's parameters are views of it.

                `self._gathering` is the handle of a gather that was started, or None. The data of each of
                `self.layout.parameters` becomes one of `self.layout.views(self.full)`. A unit that is full
                already is left as it is.
            """,
            "free": """
                Free the memory of the full parameters, and let each parameter's data be NaN in its shape.

                A unit may also have been prefetched and not used: its memory must not be freed before the
                message has arrived.
            """,
            "_before_forward": """
                Wait for the parameters of block `i`, and prefetch those of the next block.

                `self.blocks` has the list of units of each block. A backward that recomputes activations
                comes here, too: if is_in_backward(), prefetch nothing.
            """,
        },
        helps=("self.group: Group, self.pattern: str | None", *WORK),
        hints=(
            "A unit has three states: freed (is_freed), on its way (there is a handle in _gathering), and "
            "full. Which calls lead from one to the next, and which of them may be called in any state?",
            "start_gather resizes the storage, copies the shard into this rank's part of `full`, and calls "
            "all_gather(self.full, that part, ..., async_op=True). A prefetch is a start_gather without a "
            "wait; gather calls it first, in case nothing has been prefetched.",
            "gather: start_gather, and if there is a handle, wait, set it to None, and set parameter.data of "
            "each parameter. free: if there is a handle, wait and set it to None; then parameter.data = "
            "nan.expand(parameter.shape) for a NaN of the dtype and device of full, and resize_(0).",
        ),
    ),
)
