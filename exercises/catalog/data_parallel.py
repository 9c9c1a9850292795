"""Exercises of lesson 2: replicas average their gradients, later in buckets, while the backward computes."""

from exercises.catalog.exercise import Exercise

SAMPLER = "tests/data_parallel/test_sampler.py::"
REPLICAS = "tests/data_parallel/test_replicas.py::"
WRAPPERS = "tests/test_wrappers.py::"
NARRATED = "tests/data_parallel/test_narrated.py::"
BUCKETS = "tests/data_parallel/test_buckets.py::"

SOME_USE = REPLICAS + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros"
DOES_NOT_WAIT = REPLICAS + "test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited"
IN_THE_BACKWARD = REPLICAS + "test_messages_are_launched_in_the_backward_and_naive_sends_after_it"

EXERCISES = (
    Exercise(
        name="sampler",
        title="The share of each rank",
        notebook="01_ranks",
        target="data_parallel.sampler.DistributedSampler.__iter__",
        tests=(
            SAMPLER + "test_with_keep_shares_contain_each_example_once_and_lengths_differ_by_at_most_one",
            SAMPLER + "test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler",
            SAMPLER + "test_each_epoch_has_another_order_that_can_be_repeated",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return an iterator over the indices of this rank's share, in this epoch's order.

            The shares are those of torch.utils.data.DistributedSampler: with the same seed and epoch each
            rank has the same indices, in the same order. If all shares together are shorter than the list of
            examples, the last examples are left out. If they are longer, the first ones are repeated, as
            often as necessary.
        """,
        helps=(
            "self.num_examples: int",
            "self.world_size: int, self.rank: int",
            "self.seed: int, self.epoch: int",
            "self._total: int\n    The length of all shares together.",
        ),
        hints=(
            "All ranks must have the same order, which differs from epoch to epoch. What do all ranks know?",
            "torch.randperm takes a generator: torch.Generator().manual_seed(self.seed + self.epoch). A rank "
            "takes every world_size-th index of the order, beginning with its own number.",
            "Repeat the order if self._total is more than self.num_examples; three examples on eight ranks "
            "need more than one repetition. The share is order[self.rank : self._total : self.world_size].",
        ),
    ),
    Exercise(
        name="naive_gradient_sync",
        title="Averaging the gradients",
        notebook="04_naive_data_parallel",
        target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
        tests=(
            "tests/data_parallel/test_narrated.py::test_naive_equals_one_process",
            REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
            REPLICAS + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros",
            REPLICAS + "test_a_module_may_have_no_trained_parameters",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[naive]",
        ),
        difficulty=1,
        minutes=15,
        doc="""
            Average the gradients, parameter by parameter, over the ranks of the group.

            A rank has used a parameter if its `.grad` is not None. Where it
            did not, it contributes zeros, and gets the mean too.
        """,
        helps=(
            "self.trained: list[nn.Parameter]\n    The parameters that are not frozen.",
            "self.group: Group\n    It is passed on to all_reduce.",
        ),
        hints=(
            "What happens if one rank calls all_reduce for a parameter, and another rank, which did not use "
            "it, does not?",
            "Ranks pair their all-reduces by the order of the calls, so all ranks must call it for the same "
            "parameters. Set the gradient of an unused one to torch.zeros_like(parameter) first.",
            "For each parameter of self.trained: all_reduce(parameter.grad, 'mean', self.group). It writes "
            "the mean into its tensor.",
        ),
    ),
    Exercise(
        name="open_naive",
        title="Data parallel from nothing",
        notebook="04_naive_data_parallel",
        target="data_parallel.train_naive.NaiveDataParallel",
        tests=(
            WRAPPERS + "test_two_ranks_train_as_one_process[naive]",
            REPLICAS + "test_naive_reduces_each_parameter_once",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[naive]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[naive]",
        ),
        difficulty=2,
        minutes=30,
        needs=("naive_gradient_sync",),
        stub='''
            from torch import nn

            from comm.collectives import all_reduce, broadcast


            class NaiveDataParallel(nn.Module):
                """Wraps a module, so that ranks with different examples train it as one process would.

                All ranks of `group` begin with the parameters and buffers of its first rank. Calling the
                wrapper calls `self.module`.
                After the last backward of a step the user calls `finish_gradient_sync()`: then each
                parameter's gradient is the mean over the ranks of `group`. A parameter that this rank has not
                used counts as zero; frozen ones have no gradient. The gradients of several backwards add up.
                The user divides the losses of microbatches, so that this sum is the gradient of the mean
                loss.
                """

                def __init__(self, module, group=None):
                    raise NotImplementedError

                def forward(self, *inputs, **named_inputs):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError
        ''',
        hints=(
            "What must be equal on all ranks before the first step so that equal gradients keep them equal?",
            "Ranks pair their collectives by the order of the calls. So all ranks must reduce the same "
            "parameters, also those that a rank has not used.",
            "Buffers and parameters of a module that was drawn with another seed come from "
            "broadcast(tensor.data, root=0).",
        ),
    ),
    Exercise(
        name="accumulation",
        title="Gradient accumulation",
        notebook="04_naive_data_parallel",
        target="data_parallel.train_naive_grad_accumulation.accumulate",
        tests=(
            NARRATED + "test_microbatches_count_by_their_numbers_of_valid_targets",
            NARRATED + "test_accumulation_equals_one_process",
        ),
        difficulty=1,
        minutes=10,
        beyond="activations of accumulation",
        needs=("naive_gradient_sync",),
        hints=(
            "The loss is the mean over all valid targets of the step: the sum of their losses, divided by "
            "their number. What does autograd do with the gradients of a second backward: replace, add or "
            "average them?",
            "A backward adds to the gradients that are there. To get a mean, divide each sum of losses by "
            "the targets of the whole step. Only one microbatch has a graph at a time: run its "
            "backward at once.",
            "For each (x, y): loss = loss_of(model(x), y, num_targets), then loss.backward(), then add "
            "loss.detach() to the total. A sum of losses that are not detached would keep all graphs alive.",
        ),
    ),
    Exercise(
        name="overlap_hooks",
        title="All-reduces in the backward",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_overlap.OverlapDataParallel._launch",
        also=("data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",),
        tests=(
            NARRATED + "test_overlap_equals_one_process",
            REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
            SOME_USE,
            REPLICAS + "test_a_gradient_that_only_an_earlier_microbatch_has_is_averaged_too",
            DOES_NOT_WAIT,
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[overlap]",
        ),
        difficulty=2,
        minutes=25,
        needs=("naive_gradient_sync",),
        doc="""
            Start to average the gradient of a parameter, and return while it travels.

            Hooks call it in the backward, and finish_gradient_sync for a parameter that this rank did not
            use: then the rank contributes zeros. When the message has arrived, the gradient is the mean over
            the ranks.
        """,
        docs={
            "finish_gradient_sync": """
                Return when all gradients are means over the ranks, also those that no hook has launched.
            """,
        },
        helps=(
            "self.group: Group",
            "self.in_flight: list[Work]\n    The all-reduces that have been launched; each one has wait().",
            "self._to_launch: deque[nn.Parameter]\n    "
            "Those that are left, in the order that all ranks share.",
            "self._expect_gradients()\n    Call it last: it prepares for the next backward.",
        ),
        hints=(
            "With async_op=True, all_reduce returns at once with a handle, and handle.wait() waits for the "
            "end. A hook that waits stops the backward: then nothing is hidden.",
            "In _launch give a parameter without a gradient one of zeros: another rank may have used it, and "
            "all ranks must call all_reduce for the same parameters.",
            "In finish_gradient_sync launch self._to_launch.popleft() until the deque is empty. Then wait "
            "for each handle of self.in_flight.",
        ),
    ),
    Exercise(
        name="launch_order",
        title="One order on all ranks",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_overlap.OverlapDataParallel._on_gradient",
        tests=(
            NARRATED + "test_overlap_equals_one_process",
            WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[overlap]",
            SOME_USE,
            WRAPPERS
            + "test_a_step_sends_what_the_formula_says_and_replicas_nothing_before_the_last_microbatch",
            IN_THE_BACKWARD,
            WRAPPERS + "test_what_would_train_wrongly_is_refused_in_a_sentence",
        ),
        difficulty=2,
        minutes=20,
        needs=("overlap_hooks",),
        doc="""
            Run as a hook in each backward: this one has added its gradient of `parameter` to those before.

            In the last microbatch the gradient then holds the sum over microbatches. Ranks pair their
            all-reduces by the order of the calls. So all ranks must launch the parameters in one order, each
            once and as early as possible, and in the last microbatch only.
        """,
        helps=(
            "self._to_launch: deque[nn.Parameter]\n    "
            "Those that have not been launched, in the order that all ranks share.",
            "self._launch(parameter)\n    Start the all-reduce of a gradient.",
            "self._complete: set[nn.Parameter]\n    A set for your own use, empty when a step begins.",
            "self.require_backward_grad_sync: bool\n    Whether this is the last microbatch.",
        ),
        hints=(
            "A gradient that is complete early waits for all those before it. Which parameter is the next "
            "one to be launched?",
            "The next one is self._to_launch[0]. One call of the hook may launch several parameters, or "
            "none.",
            "Add the parameter to self._complete. While there are parameters to launch, and the first of "
            "them is complete, launch self._to_launch.popleft().",
        ),
    ),
    Exercise(
        name="bucket_layout",
        title="Which gradients share a bucket",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_bucket_overlap.fill",
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
            "Keep the bytes that are left in the last bucket: begin with MIB * first_mb for the first bucket "
            "and MIB * bucket_mb for each later one, and subtract parameter.nbytes. The bucket is full when "
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
            BUCKETS + "test_the_place_of_a_gradient_that_is_missing_is_filled_with_zeros",
            WRAPPERS + "test_fused_optimizers_find_gradients_in_the_order_of_their_parameters",
        ),
        difficulty=2,
        minutes=25,
        needs=("bucket_layout",),
        doc="""
            Make a flat tensor of zeros, with a place for the gradient of each parameter.

            A view has the shape of its parameter, and the strides that autograd gives to its gradient, which
            are those of torch.empty_like(parameter). All parameters have one dtype and device, and at first
            all gradients are missing.
        """,
        docs={
            "move_in": """
                Make the parameter's gradient the view of its place in this bucket, with the gradient's
                values.

                Do not copy a gradient that is that view already. A gradient that this rank does not have is
                zero.
            """,
        },
        helps=(
            "self.flat: Tensor\n    To set: the flat tensor.",
            "self.views: dict[nn.Parameter, Tensor]\n    To set: the view of each parameter's place.",
            "self.missing: set[nn.Parameter]\n    To set: those whose gradient is not there yet.",
        ),
        hints=(
            "tensor.split(sizes) returns views, one for each size, and view.as_strided(shape, strides) shows "
            "the same memory in another form. Nothing is copied: who writes to a view, writes to the bucket.",
            "After zero_grad() a parameter's grad is None, so autograd makes a new tensor, which has to be "
            "copied into its place. After zero_grad(set_to_none=False) the grad is still the view. `is` "
            "tells the two apart.",
            "In move_in: if grad is None, view.zero_(). Otherwise, if grad is not the view, "
            "view.copy_(grad). In the end parameter.grad = view.",
        ),
    ),
    Exercise(
        name="open_buckets",
        title="Buckets and overlap from nothing",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_bucket_overlap.BucketDataParallel",
        tests=(
            WRAPPERS + "test_two_ranks_train_as_one_process[buckets]",
            REPLICAS + "test_a_message_carries_a_bucket_and_no_sync_sends_nothing",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[buckets]",
            REPLICAS + "test_buckets_are_sent_while_the_backward_computes",
            DOES_NOT_WAIT,
            WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[buckets]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[buckets]",
        ),
        difficulty=4,
        minutes=90,
        needs=("open_naive", "bucket_views", "launch_order"),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import all_reduce, broadcast


            class BucketDataParallel(nn.Module):
                """Does what NaiveDataParallel does, in few messages that travel while the backward computes.

                All ranks begin with rank 0's parameters and buffers, and unused parameters count as zero.
                Gradients share buckets, which are filled in the reverse order of `module.parameters()`: a
                bucket is full when it has `bucket_mb` MiB or more. Each bucket is one all-reduce, which
                starts in the last backward, as soon as all gradients of it and of the earlier buckets are
                complete; the backward goes on while it travels. The user sets `require_backward_grad_sync`:
                it is False in all backwards of a step but the last, and in these nothing is sent.
                `finish_gradient_sync()` waits for all.
                """

                def __init__(self, module, group=None, bucket_mb=1.0):
                    raise NotImplementedError

                def forward(self, *inputs, **named_inputs):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError
        ''',
        hints=(
            "parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) in a backward, when "
            "the gradient has been added. In which order do the parameters of a model come?",
            "Ranks may see gradients in different orders, and a rank may miss some. The buckets must leave "
            "in one order on all ranks, and those that no hook has completed in finish_gradient_sync().",
            "all_reduce(flat, 'mean', group, async_op=True) returns a handle. When all handles have been "
            "waited for, copy each part of the flat tensor into its parameter's gradient.",
        ),
    ),
)
