"""Exercises of lesson 2, first part: every rank has a slice of the batch, and gradients are averaged."""

from exercises.catalog.exercise import Exercise

SAMPLER = "tests/data_parallel/test_sampler.py::"
EQUIVALENCE = "tests/data_parallel/test_equivalence.py::"
LATE = "tests/data_parallel/test_late_gradients.py::"

EXERCISES = (
    Exercise(
        name="sampler",
        title="The share of each rank",
        notebook="01_ranks",
        target="data_parallel.sampler.DistributedSampler.__iter__",
        tests=(
            SAMPLER + "test_with_keep_shares_contain_each_example_once_and_lengths_differ_by_at_most_one",
            SAMPLER + "test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler",
            SAMPLER + "test_each_epoch_has_another_order",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return an iterator over the indices of this rank's share, in this epoch's order.

            `self._total` is the length of all shares together. If it is less than `self.num_examples`, the
            last examples are left out; if it is more, the first ones are repeated, as often as necessary.
        """,
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
            EQUIVALENCE + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
            EQUIVALENCE + "test_a_parameter_has_a_gradient_on_all_ranks_or_on_none",
            EQUIVALENCE + "test_a_module_without_trained_parameters_is_allowed",
            LATE + "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all",
            LATE + "test_a_parameter_that_is_used_keeps_a_gradient_of_zeros",
            EQUIVALENCE + "test_gradients_are_averaged_within_the_given_group_only",
            "tests/data_parallel/test_naive.py::test_naive_sends_each_gradient_and_the_flags_after_the_backward",
        ),
        difficulty=2,
        minutes=25,
        doc="""
            Average the gradients, parameter by parameter, over the ranks of `self.group`.

            `self.module` is the model. A rank has used a parameter if its `.grad` is not None. Where a rank
            did not use a parameter, it contributes zeros. A parameter that no rank used keeps `.grad` None.
            The ranks first agree, in one all-reduce, on which parameters any rank has used, or they would
            wait for different parameters. The `op` of all_reduce may be "sum", "mean" or "max", and
            `pattern=self.pattern` chooses its algorithm. Frozen parameters are left out. At the end call
            `self._guard.synchronised()`.
        """,
        hints=(
            "Without unused parameters this is a loop: all_reduce(parameter.grad, op='mean', "
            "group=self.group, pattern=self.pattern) for each parameter that requires a gradient.",
            "Before the loop make a tensor with a flag for each trained parameter: 1 if this rank has a "
            "gradient. Reduce it with op='max'. Then a flag is 1 where any rank has a gradient.",
            "In the loop skip parameters whose flag is 0. If the flag is 1 and this rank has no gradient, "
            "set it to torch.zeros_like(parameter) first. The flags may have the dtype torch.uint8.",
        ),
    ),
    Exercise(
        name="accumulation",
        title="Gradient accumulation",
        notebook="04_naive_data_parallel",
        target="data_parallel.train_naive_grad_accumulation.accumulate",
        tests=("tests/data_parallel/test_narrated.py::test_accumulation_equals_one_process",),
        difficulty=1,
        minutes=10,
        beyond="activations of accumulation",
        needs=("naive_gradient_sync",),
        hints=(
            "The mean over all examples is the mean of the microbatches' means, because they are equal in "
            "size. What does autograd do with the gradients of a second backward: replace, add or average "
            "them?",
            "A backward adds to the gradients that are there. To get a mean, divide each loss by the number "
            "of microbatches before its backward. Only one microbatch has a graph at a time: run its "
            "backward at once.",
            "For each (x, y): loss = loss_of(model(x), y) / len(parts), then loss.backward(), then add "
            "loss.detach() to the total. A sum of losses that are not detached would keep all graphs alive.",
        ),
    ),
)
