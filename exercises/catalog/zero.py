"""Exercises of lesson 2, second part: ZeRO divides optimizer state, gradients and parameters."""

from exercises.catalog.exercise import Exercise

ONE_PROCESS = "tests/zero/test_narrated.py::"
MEMORY = "tests/zero/test_costs.py::"
COSTS = "tests/zero/test_costs.py::test_a_rank_holds_an_nth_of_what_its_stage_divides_and_sends_little"
WRAPPERS = "tests/test_wrappers.py::"

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
            WRAPPERS + "test_two_ranks_train_as_one_process[zero1]",
            WRAPPERS + "test_any_number_of_ranks_trains_any_model_as_one_process[4]",
        ),
        difficulty=3,
        minutes=30,
        needs=("memory_formulas",),
        doc="""
            Return for each parameter at which element this rank's shard of it starts, and a view of it.

            The parameters stand one after the other in a flat tensor, of which `shard` is this rank's part.
            If a parameter is not in this rank's part, the view is empty, and starts at 0.
        """,
        helps=(
            "self.sizes: list[int]\n    How many numbers each parameter has.",
            "self.mine: slice\n    Where this rank's part is in the flat tensor.",
        ),
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
        title="ZeRO 1 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero1.ZeroOptimizer",
        tests=(
            WRAPPERS + "test_two_ranks_train_as_one_process[zero1]",
            COSTS + "[zero1]",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[zero1]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero1]",
            WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[zero1]",
        ),
        difficulty=4,
        minutes=75,
        needs=("zero_shards",),
        stub='''
            import torch

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class ZeroOptimizer:
                """Trains parameters with an `optimizer_class`, of whose state each rank has an n-th.

                `defaults` are the optimizer's options. All ranks of `group` begin with its first rank's
                parameters. A step is zero_grad(), one or several backwards, and step(). Afterwards the
                parameters are what one process would have, with the mean of the ranks' gradients; an unused
                parameter counts as one with zeros, and frozen ones do not change. The user may call
                finish_gradient_sync() before step(), to have the mean gradients of the rank's n-th. Between
                steps a rank has the parameters, memory for the gradients, and the optimizer's state of its
                n-th, and in a step it sends (n-1)/n of the gradients' bytes and (n-1)/n of the parameters'.
                You may assume that `optimizer_class` works element by element. The user divides the losses of
                microbatches.
                """

                def __init__(self, params, optimizer_class, group=None, **defaults):
                    raise NotImplementedError

                def zero_grad(self):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError

                def step(self):
                    raise NotImplementedError
        ''',
        hints=(
            "An all-reduce of the gradients is a reduce-scatter and an all-gather. Which of the two does an "
            "optimizer need that updates an n-th of the numbers?",
            "Let the parameters be views of one flat tensor, padded so that n divides it. An ordinary "
            "optimizer can train this rank's part of it: a nn.Parameter that shares the memory.",
            "reduce_scatter(own, flat, 'mean', group) gives this rank's part of the gradients, which is the "
            "gradient of the shard. After the inner step, all_gather(flat, own part, group) changes the "
            "model.",
        ),
    ),
    Exercise(
        name="zero2",
        title="ZeRO 2 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero2.ZeroGradientOptimizer",
        tests=(
            WRAPPERS + "test_two_ranks_train_as_one_process[zero2]",
            COSTS + "[zero2]",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[zero2]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero2]",
        ),
        difficulty=3,
        minutes=45,
        needs=("zero1",),
        stub='''
            import torch

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class ZeroGradientOptimizer:
                """Does what the optimizer of ZeRO 1 does, and keeps an n-th of the gradients only.

                Its methods are those of the exercise zero1. Between steps a rank has the parameters and, of
                the gradients and of the optimizer's state, its n-th. So a gradient of the model is freed when
                its part of the mean has reached the rank that owns it, at the latest in
                finish_gradient_sync(). The user calls that after the backward of each microbatch, and the
                parts add up until zero_grad().
                """

                def __init__(self, params, optimizer_class, group=None, **defaults):
                    raise NotImplementedError
        ''',
        hints=(
            "What holds memory for a gradient? Everything that still refers to it: the parameter's grad, "
            "a flat tensor, a view of one.",
            "A view keeps the whole flat tensor alive. This rank's part of the mean is a tensor of its own.",
            "Make the flat tensor of gradients in finish_gradient_sync(), reduce-scatter it into a new "
            "tensor of an n-th, and set the gradients of the parameters to None. Better: bucket by bucket, "
            "with a hook, so that never more than a few buckets are alive.",
        ),
    ),
    Exercise(
        name="zero3",
        title="ZeRO 3 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero3.FullyShardedDataParallel",
        tests=(
            WRAPPERS + "test_two_ranks_train_as_one_process[zero3]",
            COSTS + "[zero3]",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[zero3]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero3]",
        ),
        difficulty=5,
        minutes=120,
        needs=("zero2",),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class FullyShardedDataParallel(nn.Module):
                """Wraps a module of which each rank keeps an n-th: parameters, gradients, optimizer's state.

                All ranks of `group` begin with its first rank's parameters and buffers. `parameters()` are
                this rank's shards of those that are trained: an ordinary optimizer gets them. Calling the
                wrapper calls the module with full parameters. After the last backward of a step the user
                calls `finish_gradient_sync()`: then each shard's gradient is the mean over the ranks of
                `group`, with zeros for what was not used. The gradients of several backwards add up.
                `full_state_dict()`, which all ranks call, returns the module's full state by its own names.
                Between steps a rank holds an n-th of everything, and in a step it sends at most (n-1)/n of
                three times the parameters' bytes.
                """

                def __init__(self, module, group=None):
                    raise NotImplementedError
        ''',
        hints=(
            "When does a rank need the full parameters, and when not? The forward and the backward need "
            "them, and the optimizer does not.",
            "tensor.untyped_storage().resize_(0) frees the memory of a flat tensor, also where autograd has "
            "kept views of it, and resize_(n) gives it memory again before it is filled.",
            "Gather in forward(), and free in finish_gradient_sync(): that is right, and sends twice the "
            "parameters' bytes with the reduce-scatter. To hold one block at a time, gather it in a forward "
            "hook and again in the backward, which makes three times.",
        ),
    ),
)
