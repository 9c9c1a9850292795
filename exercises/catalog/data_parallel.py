"""Exercises of lesson 2, first part: every rank has a slice of the batch, and gradients are averaged."""

from exercises.catalog.exercise import Exercise

SAMPLER = "tests/data_parallel/test_sampler.py::"
EQUIVALENCE = "tests/data_parallel/test_equivalence.py::"

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

            `self._total` is the length of all shares together. If it is less than `self.num_examples`, the
            last examples are left out; if it is more, the first ones are repeated, as often as necessary.
        """,
        helps=("self.seed: int, self.world_size: int",),
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
            EQUIVALENCE + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros",
            EQUIVALENCE + "test_a_module_may_have_no_trained_parameters",
            EQUIVALENCE + "test_gradients_are_averaged_within_the_given_group_only",
        ),
        difficulty=1,
        minutes=15,
        doc="""
            Average the gradients, parameter by parameter, over the ranks of `self.group`.

            `self.module` is the model. Frozen parameters are left out. A rank has used a parameter if its
            `.grad` is not None; where it did not, it contributes zeros. The `op` of all_reduce may be "sum",
            "mean" or "max", and `pattern=self.pattern` chooses its algorithm.
        """,
        hints=(
            "A frozen parameter does not require a gradient. What happens if one rank calls all_reduce for a "
            "parameter, and another rank, which did not use it, does not?",
            "Ranks pair their all-reduces by the order of the calls, so all ranks must call it for the same "
            "parameters. Set the gradient of an unused one to torch.zeros_like(parameter) first.",
            "For each parameter that requires a gradient: all_reduce(parameter.grad, op='mean', "
            "group=self.group, pattern=self.pattern), which writes the mean into its tensor.",
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
