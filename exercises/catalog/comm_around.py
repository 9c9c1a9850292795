"""Exercises of lesson 1, second part: the cost and the gradients of collectives."""

from exercises.catalog.exercise import Exercise

FUNCTIONS = "tests/comm/test_functions.py::"

EXERCISES = (
    Exercise(
        name="predicted_seconds",
        title="The predicted time of a collective",
        notebook="03_cost_of_a_message",
        target="comm.cost.seconds",
        tests=(
            "tests/comm/test_cost.py::test_predicted_seconds_follow_alpha_and_beta",
            "tests/comm/test_cost.py::test_an_unknown_pattern_has_no_formula",
        ),
        difficulty=3,
        minutes=40,
        needs=("tree_broadcast", "ring_all_gather"),
        doc="""
            Return the predicted seconds of a collective. The full tensor has `num_bytes`, on all n ranks.

            A message of b bytes takes link.alpha + b * link.beta seconds. With one rank nothing is sent: the
            result is 0, for any op and pattern. L = `_log2_up(n)` is the number of rounds of a tree, and B
            the bytes of the full tensor.

                barrier           tree       no message but headers
                broadcast         flat       the root sends n-1 times, one message after another; the
                                             latencies overlap: alpha + (n-1) B beta
                                  tree       L rounds with the full tensor
                reduce            flat, tree as a broadcast
                                  pairwise   a reduce_scatter, pairwise, and a flat gather of the result
                scatter, gather   flat       n-1 messages of an n-th each; the latencies overlap
                all_gather        ring       n-1 messages of an n-th, one after another
                reduce_scatter    ring       the same
                all_reduce        ring       a reduce_scatter and an all_gather
                                  flat, tree a reduce and a broadcast
                                  recursive_doubling   log2 n rounds; each sends the full tensor
                                  halving_doubling     log2 n rounds, which send 1/2, 1/4, ... and 1/n of
                                             the tensor, and the same number of rounds back
                all_to_all        pairwise   n-1 messages of an n-th, one after another

            Wherever there is a ring, pipelined_ring and pairwise are patterns, too, and cost as much. If n is
            no power of two, the two doublings take as long as with the largest power of two below n, and two
            messages of the full tensor more.

            Before a collective the ranks compare small messages, the headers. Their bytes are ignored. Add
            them once to each collective, also where it is two in sequence: L alpha. Raise ValueError "There
            is no formula for {op} with pattern {pattern!r}." for anything else.
        """,
        hints=(
            "Count the steps that must follow one another, and the bytes that one rank sends in each step. "
            "The ring's all-gather has n-1 steps, and each sends an n-th of the tensor.",
            "Where latencies overlap, alpha counts once and the bytes of all messages count: a flat scatter "
            "takes alpha + (n-1)/n B beta. Headers are the last thing to add: one term, the same for each "
            "collective.",
            "Halving-doubling: 2 log2 n alpha + 2 (n-1)/n B beta. For n that is no power of two, put p, the "
            "largest power of two below n, into the formulas of the two doublings, and add 2 (alpha + B "
            "beta). The headers still have the L of n.",
        ),
    ),
    Exercise(
        name="conjugate_functions",
        title="Collectives and their conjugates",
        notebook="02_collectives",
        target="comm.functions.sum_over_ranks",
        also=(
            "comm.functions.copy_to_ranks",
            "comm.functions.gather_from_ranks",
            "comm.functions.split_to_ranks",
        ),
        tests=(
            "tests/comm/test_narrated.py::test_a_function_and_its_conjugate_equal_one_process",
            FUNCTIONS + "test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum",
            FUNCTIONS + "test_each_pair_is_what_autograd_finds_on_one_process[3]",
            FUNCTIONS + "test_inputs_outputs_and_gradients_are_left_as_they_were",
        ),
        difficulty=3,
        minutes=35,
        needs=("ring_all_reduce",),
        doc="""
            Return the sum of all ranks' `x`. All ranks compute the same loss from it, which counts once.

            Use `_Pair.apply(x, forward, backward)`: `forward` makes the output from x, and `backward` makes
            the gradient of x from that of the output. `summed` returns the sum over ranks in a new tensor,
            and `own_shard` this rank's shard as a view. `InFlightAllGather(shard, dim, group, size).wait()`
            returns all shards together. No function may return or change the memory of its input.
        """,
        docs={
            "copy_to_ranks": """
                Return `x`, which is the same on all ranks. Each rank computes something else from it.
            """,
            "gather_from_ranks": """
                Return the shards of all ranks, together along `dim`.

                All ranks compute the same loss from the result. If shards differ, `size` is the full size.
            """,
            "split_to_ranks": """
                Return this rank's shard along `dim` of `x`, which is the same on all ranks.

                Each rank computes something else from its shard.
            """,
        },
        hints=(
            "Ask of each function: is the gradient that arrives in the backward complete on every rank, or "
            "does each rank have one term or one shard of it?",
            "If all ranks compute the same loss from an output, its gradient is complete on each of them, "
            "and another sum would make it n times too large. If each computes something else from an "
            "input, each has one term of the input's gradient.",
            "The backwards: the identity for sum_over_ranks, `summed` for copy_to_ranks, `own_shard` for "
            "gather_from_ranks, and an all-gather for split_to_ranks, whose full size is x.shape[dim]. The "
            "forward of copy_to_ranks is x.view_as(x).",
        ),
    ),
)
