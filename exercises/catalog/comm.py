"""Exercises of lesson 1: messages between ranks, and the collectives made of them."""

from exercises.catalog.exercise import Exercise

NARRATED = "tests/comm/test_narrated.py::"
BY_HAND = "tests/comm/test_collectives_by_hand.py::"
COLLECTIVES = "tests/comm/test_collectives.py::"
EVERY_SIZE = COLLECTIVES + "test_every_pattern_equals_the_reference_at_every_size[3]"
COUNTED = "tests/comm/test_cost.py::test_counted_traffic_equals_the_formula_exactly[3]"
WIRE = ("wire.rank: int, wire.size: int\n    This rank's number, from 0, and the number of ranks.",)
MESSAGES = (
    "wire.isend(tensor, dst) -> Transfer\n    Start to send a contiguous tensor.",
    "wire.irecv(tensor, src) -> Transfer\n    Start to receive into a tensor of the size that is sent.",
    "transfer.wait()\n    Block until the message has arrived, or has left.",
)
FUNCTIONS = "tests/comm/test_functions.py::"
BEHAVIOUR = "tests/comm/test_behaviour.py::"

EXERCISES = (
    Exercise(
        name="send_and_receive",
        title="Sending and receiving without a deadlock",
        notebook="02_collectives",
        target="comm.algorithms.ring.shift",
        tests=(
            NARRATED + "test_ring_all_reduce_equals_one_process",
            COLLECTIVES + "test_every_reduction_is_right_in_every_dtype[ring]",
            EVERY_SIZE,
            BY_HAND + "test_a_ring_starts_no_message_for_an_empty_tensor",
        ),
        difficulty=1,
        minutes=15,
        doc="""
            Send `outgoing` to rank r+1 and receive `incoming` from rank r-1, modulo n.

            The two tensors may have different sizes. An empty tensor (`numel()` is 0) is neither sent nor
            received; the neighbour knows its size, too. All ranks call this at the same time, and none may
            wait forever.
        """,
        helps=(*WIRE, *MESSAGES),
        hints=(
            "`wire.isend(tensor, rank)` and `wire.irecv(tensor, rank)` start a message and return at once. "
            "Each returns a transfer, and `transfer.wait()` returns when the message is done.",
            "Start the receive from rank r-1 and the send to rank r+1, both modulo n, and only then wait "
            "for both. If every rank waited for its own send first, no rank would receive.",
            "A tensor may be empty (`tensor.numel()` is 0). Then there is no message: neither start a "
            "transfer for it nor wait for one. The two tensors may have different sizes, so look at each.",
        ),
    ),
    Exercise(
        name="tree_broadcast",
        title="Tree broadcast",
        notebook="02_collectives",
        target="comm.algorithms.tree.broadcast",
        tests=(
            NARRATED + "test_tree_broadcast_equals_one_process",
            BY_HAND + "test_a_tree_broadcasts_from_every_root",
            BY_HAND + "test_a_tree_sends_to_the_largest_subtree_first_and_to_one_child_at_a_time",
            COUNTED,
        ),
        difficulty=1,
        minutes=15,
        beyond="bytes of tree broadcast",
        needs=("send_and_receive",),
        doc="""
            Copy the root's `tensor` to every rank's, down a binomial tree. An empty tensor is not sent.

            `family(wire, root)` returns this rank's parent, which is None at the root, and the list of its
            children, the child with the largest subtree first.
        """,
        helps=MESSAGES,
        hints=(
            "Every rank but the root has one parent, and may have children. What must a rank have before it "
            "can send anything to its children?",
            "Receive from the parent if there is one, and wait. Then send to the children in the order in "
            "which `family` lists them, because the largest subtree has the longest way to go.",
            "Wait for each send before the next one starts: two messages at a time would share the link. "
            "Return at once if tensor.numel() is 0.",
        ),
    ),
    Exercise(
        name="binomial_tree",
        title="Parents and children in a binomial tree",
        notebook="02_collectives",
        target="comm.algorithms.tree.family",
        tests=(
            NARRATED + "test_tree_broadcast_equals_one_process",
            NARRATED + "test_tree_all_reduce_equals_one_process",
            BY_HAND + "test_a_tree_broadcasts_from_every_root",
        ),
        difficulty=3,
        minutes=30,
        needs=("tree_broadcast",),
        helps=WIRE,
        hints=(
            "Count positions from the root: position = (rank - root) % size. The root is at position 0. "
            "Find parents and children as positions, and turn them into ranks at the end.",
            "Position 6 is 110 in binary. Its parent is 4, or 100: clear the lowest 1 bit. That bit, "
            "position & -position, is the position's reach: its subtree has the positions up to the reach.",
            "The reach of the root is the smallest power of two that is at least the size. The children are "
            "at position + reach/2, position + reach/4, ... and position + 1, where these are below size.",
        ),
    ),
    Exercise(
        name="ring_reduce_scatter",
        title="Ring reduce-scatter",
        notebook="02_collectives",
        target="comm.algorithms.ring.reduce_chunks",
        tests=(
            NARRATED + "test_ring_all_reduce_equals_one_process",
            COLLECTIVES + "test_every_reduction_is_right_in_every_dtype[ring]",
        ),
        difficulty=2,
        minutes=25,
        beyond="bytes of ring reduce_scatter",
        needs=("send_and_receive",),
        helps=WIRE,
        hints=(
            "There are n-1 steps. In each one a rank sends one chunk to the right with `shift`, receives "
            "another one from the left, and adds its own chunk to what has arrived.",
            "Chunk r must end on rank r, and it moves right by one rank in each step. So it starts on rank "
            "r+1: in step 0 rank r sends chunk r-1 and receives chunk r-2, both modulo n.",
            "In step s, rank r sends chunks[(r - 1 - s) % n] and reduces chunks[(r - 2 - s) % n]. Receive "
            "into a new tensor, then call combine(op, arrived, mine, out=mine). After the loop divide chunk "
            "r if the reduction is a mean.",
        ),
    ),
    Exercise(
        name="ring_all_gather",
        title="Ring all-gather",
        notebook="02_collectives",
        target="comm.algorithms.ring.gather_chunks",
        tests=(
            NARRATED + "test_ring_all_reduce_equals_one_process",
            NARRATED + "test_pipelined_ring_all_reduce_equals_one_process",
        ),
        difficulty=1,
        minutes=15,
        beyond="bytes of ring all_gather",
        needs=("ring_reduce_scatter",),
        helps=WIRE,
        hints=(
            "A rank sends on what it received in the step before. In step 0 it sends its own chunk.",
            "What a rank receives in step s is what its left neighbour sends in step s. Nothing is added, "
            "so a chunk can be received where it belongs.",
            "In step s of n-1, rank r sends chunks[(r - s) % n] and receives chunks[(r - 1 - s) % n].",
        ),
    ),
    Exercise(
        name="ring_all_reduce",
        title="Ring all-reduce",
        notebook="02_collectives",
        target="comm.algorithms.ring.all_reduce",
        tests=(
            NARRATED + "test_ring_all_reduce_equals_one_process",
            COLLECTIVES + "test_every_reduction_is_right_in_every_dtype[ring]",
        ),
        difficulty=1,
        minutes=10,
        beyond="bytes of ring all_reduce",
        needs=("ring_reduce_scatter", "ring_all_gather"),
        doc="""
            Replace every rank's `full` by the reduction of all, in 2(n-1) messages of an n-th of it.
        """,
        helps=WIRE,
        hints=(
            "After a reduce-scatter each rank has one finished chunk, and the other chunks are partial "
            "sums. What is missing?",
            "shards_of(full, wire.size) returns the chunks as views. What is written into a chunk is "
            "written into `full`.",
            "Divide `full` into chunks, call reduce_chunks(wire, chunks, op), and then gather_chunks(wire, "
            "chunks).",
        ),
    ),
    Exercise(
        name="open_all_reduce",
        title="An all-reduce of your own",
        notebook="02_collectives",
        target="comm.algorithms.ring.all_reduce",
        tests=(
            BEHAVIOUR + "test_two_ranks_have_the_sum_of_both",
            BEHAVIOUR + "test_all_ranks_have_the_reduction_of_all",
            BEHAVIOUR + "test_no_rank_sends_more_than_in_a_ring",
            BEHAVIOUR + "test_a_tensor_without_elements_is_neither_sent_nor_received",
        ),
        difficulty=3,
        minutes=45,
        needs=("ring_all_reduce",),
        helps=(*WIRE, *MESSAGES),
        stub='''
            import torch


            def all_reduce(wire, full, op):
                """Replace every rank's flat tensor `full` by the reduction of all ranks' tensors.

                `op` is "sum", "mean", "max", "min" or "product". There may be any number of ranks, and fewer
                elements than ranks. With n ranks and S bytes no rank sends more than 2(n-1) messages and,
                where n divides the elements, 2(n-1)/n S bytes. A tensor without elements is
                neither sent nor received.
                """
                raise NotImplementedError
        ''',
        hints=(
            "If one rank collected everything, it would send (n-1) S bytes. How can all ranks reduce at the "
            "same time, each a part of the tensor?",
            "After a reduce-scatter rank r has the reduction of chunk r. How many bytes has it sent by then? "
            "What is left is an all-gather of the chunks.",
            "Either pass partial sums round a ring, or send chunk p directly to rank p, add up what arrives, "
            "and send the sum to all. Both send 2(n-1) chunks. full.tensor_split(n) gives views.",
        ),
    ),
    Exercise(
        name="halving_doubling",
        title="All-reduce by halving and doubling",
        notebook="03_cost_of_a_message",
        target="comm.algorithms.hypercube.halving_doubling",
        tests=(
            NARRATED + "test_halving_doubling_equals_one_process",
            COLLECTIVES + "test_every_reduction_is_right_in_every_dtype[halving_doubling]",
            EVERY_SIZE,
        ),
        difficulty=4,
        minutes=45,
        beyond="bytes of halving_doubling",
        needs=("ring_reduce_scatter", "ring_all_gather"),
        doc="""
            All-reduce in place: exchange and reduce smaller and smaller parts, then gather them.

            `_fold_in` and `_fold_out` do what is needed where the number of ranks is no power of two: between
            the two calls only the ranks below `n`, which `_fold_in` returns, take part. `_swap` sends one
            tensor to a partner and receives another one from it. Of two partners the lower rank keeps the
            first half, and each combines its own part with the other's in the same order on both.
        """,
        helps=WIRE,
        hints=(
            "The partner of a round is wire.rank ^ distance, with the distances n/2, n/4, ... and 1. Before "
            "the first round the part that a rank works on is the full tensor.",
            "In a round divide the part in the middle, (start + end + 1) // 2. Keep one half and swap the "
            "other: receive the partner's copy of the half that you keep, and combine the two. The next "
            "round divides that half. Note for each round the partner and the two halves.",
            "After the last round divide the part that is left if the reduction is a mean. Then go through "
            "your notes in reverse order, and swap the half that you kept for the half that you gave away. "
            "That is the all-gather.",
        ),
    ),
    Exercise(
        name="all_to_all",
        title="All-to-all",
        notebook="02_collectives",
        target="comm.algorithms.pairwise.all_to_all",
        tests=(
            NARRATED + "test_pairwise_all_to_all_equals_one_process",
            "tests/comm/test_cost.py::test_an_uneven_all_to_all_is_counted_exactly",
            BY_HAND + "test_an_all_to_all_sends_each_rank_its_part_of_any_size",
        ),
        difficulty=2,
        minutes=20,
        beyond="bytes of all_to_all",
        needs=("send_and_receive",),
        doc="""
            Send part p of `full` to rank p, and receive part p of `output` from it.

            The parts stand one after the other. `in_sizes[p]` is the number of elements of part p of `full`,
            and `out_sizes[p]` that of part p of `output`. An empty part is not sent.
        """,
        helps=(*WIRE, *MESSAGES),
        hints=(
            "full.split(in_sizes) are the parts that leave, and output.split(out_sizes) the places of those "
            "that arrive. One of the parts does not travel. Which one?",
            "Start all receives and all sends, and only then wait for all of them. This rank's own part is "
            "copied. Leave out a message whose part is empty: its sizes are 0 on both ranks.",
            "If every rank began with rank 0, all ranks would send to rank 0 at the same time. In step s = "
            "1, 2, ... n-1 rank r sends to rank r+s and receives from rank r-s, both modulo n.",
        ),
    ),
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
                scatter, gather   flat       n-1 messages of an n-th each; the latencies overlap
                all_gather        ring       n-1 messages of an n-th, one after another
                reduce_scatter    ring       the same
                all_reduce        ring       a reduce_scatter and an all_gather
                                  flat, tree a reduce and a broadcast
                                  recursive_doubling   log2 n rounds; each sends the full tensor
                                  halving_doubling     log2 n rounds, which send 1/2, 1/4, ... and 1/n of
                                             the tensor, and the same number of rounds back
                all_to_all        pairwise   n-1 messages of an n-th, one after another

            Wherever there is a ring, pipelined_ring is a pattern, too, and costs as much. If n is no power of
            two, the two doublings take as long as with the largest power of two below n, and two messages of
            the full tensor more.

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
