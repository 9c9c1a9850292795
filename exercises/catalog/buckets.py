"""Exercises of lesson 2, second part: gradients travel in buckets, while the backward computes."""

from exercises.catalog.exercise import Exercise

NARRATED = "tests/data_parallel/test_narrated.py::"
EQUIVALENCE = "tests/data_parallel/test_equivalence.py::"
BUCKETS = "tests/data_parallel/test_bucket_overlap.py::"
OVERLAP = "tests/data_parallel/test_overlap.py::"
LATE = "tests/data_parallel/test_late_gradients.py::"
LAUNCHER = "tests/data_parallel/test_ordered_launcher.py::"

EXERCISES = (
    Exercise(
        name="overlap_hooks",
        title="All-reduces in the backward",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_overlap.OverlapDataParallel._launch",
        also=(
            "data_parallel.train_overlap.OverlapDataParallel._wait_for_all",
            "data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",
        ),
        tests=(
            NARRATED + "test_overlap_equals_one_process",
            EQUIVALENCE + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
            EQUIVALENCE + "test_a_parameter_has_a_gradient_on_all_ranks_or_on_none",
            EQUIVALENCE + "test_a_module_without_trained_parameters_is_allowed",
            OVERLAP + "test_a_backward_does_not_wait_for_its_messages",
            EQUIVALENCE + "test_gradients_of_microbatches_add_up_to_those_of_the_full_batch",
            OVERLAP + "test_a_gradient_that_only_an_earlier_microbatch_has_is_averaged_too",
            LATE + "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all",
            LATE + "test_a_parameter_that_is_used_keeps_a_gradient_of_zeros",
            EQUIVALENCE + "test_gradients_are_averaged_within_the_given_group_only",
        ),
        difficulty=3,
        minutes=40,
        needs=("naive_gradient_sync",),
        doc="""
            Start to all-reduce the gradient of `self._trained[i]`, and return while it travels.

            A hook calls this in the backward when the gradient is complete. Use `self.group` and
            `self.pattern`. `self._in_flight` is a list of pairs, of a gradient and the handle of its
            all-reduce: the hook compares the gradient later, to notice a second backward. When the message
            has arrived, the gradient must be the mean over ranks. `span` only notes the launch in a trace;
            you may leave it out.
        """,
        docs={
            "_wait_for_all": """
                Wait for all gradients in flight, and forget them.

                Then call `self._launcher.reset()`, which expects the gradients of the next backward.
            """,
            "finish_gradient_sync": """
                Start the all-reduces that no hook has started, and wait for all of them.

                `self._launcher.missing()` returns the numbers of the parameters without a gradient of this
                backward. Such a parameter may still have a `.grad` of an earlier microbatch: keep it. Where a
                rank did not use a parameter, so that its `.grad` is None, the rank contributes zeros. A
                parameter that no rank used keeps `.grad` None.

                Call `self._launcher.ready(i)` for every missing number, also for one that no rank used: the
                numbers after it wait for it. Reduce the flags of which parameters are used after that. Before
                it, hooks of different ranks have started a different number of all-reduces, so the ranks
                would not pair the same calls. At the end call `self._guard.synchronised()`.
            """,
        },
        hints=(
            "With async_op=True, all_reduce returns at once with a handle, and handle.wait() waits for the "
            "end. A hook that waits stops the backward: then nothing is hidden.",
            "In finish_gradient_sync give each missing parameter a gradient of zeros, unless an earlier "
            "microbatch has left one, and call ready for it. Note in flags, as in naive_gradient_sync, "
            "which parameters this rank has used.",
            "Reduce the flags with op='max' after all gradients have been launched, so that all ranks have "
            "the same order of calls. Then wait for all. Set the gradients of zeros to None where no rank "
            "has set the flag.",
        ),
    ),
    Exercise(
        name="ordered_launcher",
        title="One order on all ranks",
        notebook="05_overlap_and_buckets",
        target="data_parallel.ordered_launcher.OrderedLauncher.ready",
        tests=(
            LAUNCHER + "test_an_item_that_is_ready_early_waits_for_the_items_before_it",
            LAUNCHER + "test_items_start_in_order_and_as_early_as_possible",
            LAUNCHER + "test_a_reset_forgets_items_that_are_ready_but_not_started",
            EQUIVALENCE + "test_hooks_on_one_rank_may_fire_in_another_order",
        ),
        difficulty=1,
        minutes=15,
        needs=("overlap_hooks",),
        doc="""
            Mark number i as ready, and launch what can be launched.

            Ranks pair their collectives by the order of the calls, so all ranks must launch 0, 1, 2 and so
            on, each once and as early as possible. `self._ready` is the set of numbers that are ready,
            `self._launched` is how many have been launched, and `self._launch(k)` launches number k.
        """,
        hints=(
            "A number that is ready early waits for all those before it. Which number is the next one to be "
            "launched?",
            "The next number to be launched is self._launched. One call of ready may launch several "
            "numbers, or none.",
            "Add i to self._ready. While self._launched is in self._ready, launch it, and add 1 to "
            "self._launched.",
        ),
    ),
    Exercise(
        name="bucket_layout",
        title="Which gradients share a bucket",
        notebook="05_overlap_and_buckets",
        target="data_parallel.flat.fill",
        tests=(
            BUCKETS + "test_a_bucket_is_closed_when_it_reaches_its_cap_and_the_first_cap_is_separate",
            BUCKETS + "test_a_parameter_larger_than_the_cap_closes_its_bucket",
            BUCKETS + "test_buckets_keep_the_order_have_one_dtype_each_and_are_filled_up_to_their_caps",
        ),
        difficulty=2,
        minutes=20,
        hints=(
            "Go through the parameters in order. Each goes into the last bucket, unless a new bucket must "
            "begin first. There are three reasons to begin one.",
            "A new bucket begins with the first parameter, when the last bucket has reached its cap, and "
            "when the dtype differs from that of the parameter before. A bucket is not closed because the "
            "next parameter would not fit.",
            "Keep the bytes that are left in the last bucket: begin with first_bytes for the first bucket "
            "and bucket_bytes for each later one, and subtract parameter.nbytes. The bucket is full when "
            "this is 0 or less.",
        ),
    ),
    Exercise(
        name="bucket_views",
        title="Gradients that live in buckets",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_bucket_overlap.Bucket.__init__",
        also=("data_parallel.train_bucket_overlap.Bucket.move_in",),
        tests=(
            NARRATED + "test_bucket_overlap_equals_one_process",
            BUCKETS + "test_gradients_are_views_of_the_buckets_however_they_are_zeroed",
            BUCKETS + "test_new_gradients_are_copied_into_the_bucket_once_and_views_are_not_copied",
            BUCKETS + "test_gradients_of_microbatches_add_up_in_the_buckets",
            BUCKETS + "test_the_place_of_a_gradient_that_is_missing_is_filled_with_zeros",
            BUCKETS + "test_a_new_bucket_takes_over_the_gradients_that_are_there_already",
        ),
        difficulty=2,
        minutes=25,
        needs=("bucket_layout",),
        doc="""
            Make a flat tensor of zeros, with a place for each parameter's gradient and for flags.

            There are `num_flags` flags at the end. Set `self.flat`; `self.flags`, the view of the flags;
            `self.views`, a dict from each parameter to the view of its place, in its shape; and
            `self.missing`, a set of all parameters. Then move in the gradients that are there already.

            All parameters have one dtype and device. The flat tensor comes from `memory.zeros`, with the
            first parameter as example: `memory` is this rank's own, or memory that the ranks share.
        """,
        docs={
            "move_in": """
                Make the parameter's gradient the view of its place in this bucket, with the gradient's
                values.

                Do not copy a gradient that is that view already. If there is no gradient, fill the place with
                zeros.
            """,
        },
        hints=(
            "tensor.split(sizes) returns views, one for each size, and view_as gives a view the shape of a "
            "parameter. Nothing is copied, so writing to a view writes into the flat tensor.",
            "After zero_grad() a parameter's grad is None, so autograd makes a new tensor, which has to be "
            "copied into its place. After zero_grad(set_to_none=False) the grad is still the view. `is` "
            "tells the two apart.",
            "In move_in: if grad is None, view.zero_(), and leave grad as it is. Otherwise, if grad is not "
            "the view, view.copy_(grad) and then parameter.grad = view.",
        ),
    ),
    Exercise(
        name="bucket_launch",
        title="Launching complete buckets",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_bucket_overlap.BucketDataParallel._on_gradient",
        also=("data_parallel.train_bucket_overlap.BucketDataParallel.finish_gradient_sync",),
        tests=(
            NARRATED + "test_bucket_overlap_equals_one_process",
            EQUIVALENCE + "test_a_parameter_has_a_gradient_on_all_ranks_or_on_none",
            EQUIVALENCE + "test_a_second_backward_before_finish_gradient_sync_is_refused",
            OVERLAP + "test_a_backward_does_not_wait_for_its_messages",
            OVERLAP + "test_nothing_is_sent_before_the_last_microbatch",
            BUCKETS + "test_all_ranks_use_rank_0s_order_after_the_first_step",
            EQUIVALENCE + "test_a_rank_without_a_backward_contributes_zeros",
            LATE + "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all",
            LATE + "test_weight_gradients_computed_after_the_backward_are_in_the_mean",
        ),
        difficulty=4,
        minutes=45,
        needs=("bucket_views", "ordered_launcher"),
        doc="""
            Run as a hook when a backward has added its gradient of this parameter.

            Return if `self._guard.has_gradient(parameter)` is False. `self._bucket_of` has the bucket of each
            parameter, and its `missing` the parameters whose gradients are not there. If this one is not
            missing, a second backward has begun: call `self._drop_unfinished(parameter)`. Move the gradient
            into the bucket. If `self._guard.is_synchronising`, tell `self.order.see(parameter)`, and launch
            what can be launched: `self._to_launch` is a deque of the buckets that are left, in order, and
            `self._launch(bucket)` starts the all-reduce of one.
        """,
        docs={
            "finish_gradient_sync": """
                Launch the remaining buckets, with zeros for gradients that are missing; wait for all.

                A parameter that no rank used has no gradient afterwards: `used_on_any_rank(self.trained,
                self.buckets[-1].flags)` returns the parameters that were used. For each parameter that is
                still missing, its gradient becomes the view in its bucket, or None. `self._wait_for_all()`
                waits. Afterwards note `self.sizes_on_wire`, the list of size_on_wire(bucket.flat,
                self.wire_dtype); if `self.order.adopt_observed(self.group)`, call `self._make_buckets()`; and
                call `self._guard.synchronised()`.
            """,
        },
        objects={"bucket": "data_parallel.train_bucket_overlap.Bucket"},
        hints=(
            "A bucket is complete when none of its parameters is missing. Which other buckets must have "
            "been launched before it?",
            "In the hook remove the parameter from bucket.missing, and then launch buckets from the left "
            "end of self._to_launch as long as the first one is complete. Outside of the last microbatch "
            "nothing is removed and nothing launched.",
            "In finish_gradient_sync first collect the parameters that are missing in self._to_launch. Move "
            "each one in, which writes zeros where there is no gradient. Then launch all, wait, and ask "
            "used_on_any_rank only if there were any.",
        ),
    ),
    Exercise(
        name="agreed_order",
        title="The order that rank 0 observed",
        notebook="05_overlap_and_buckets",
        target="data_parallel.bucket_order.BucketOrder.adopt_observed",
        tests=(
            BUCKETS + "test_all_ranks_use_rank_0s_order_after_the_first_step",
            BUCKETS + "test_a_resumed_run_equals_an_uninterrupted_run",
        ),
        difficulty=2,
        minutes=20,
        needs=("bucket_launch",),
        doc="""
            After the first step, adopt the order that rank 0 observed. Return whether the order changed.

            `self._seen` is the list of parameters in the order in which this rank's gradients came, and None
            after the first step. `self._observed(seen)` makes positions of it, and puts those that were not
            seen at the end. `self._numbers` is the order now, a list of positions. `self.was_sent` must be
            True if this call sends the order, else False.
        """,
        hints=(
            "The ranks may have observed different orders. Which of them is right does not matter, as long "
            "as all take the same.",
            "Each rank makes a tensor of torch.int64 of its own observed order, so that all have the right "
            "size. Then broadcast it from rank 0, in self.group.",
            "Return False at once if self._seen is None. Else set self._seen to None, broadcast the "
            "message, set self._numbers to message.tolist(), and compare it with what it was before.",
        ),
    ),
)
