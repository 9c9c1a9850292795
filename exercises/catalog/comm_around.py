"""Exercises of lesson 1, second part: the cost and the gradients of collectives, and how ranks meet."""

from exercises.catalog.exercise import Exercise

FUNCTIONS = "tests/comm/test_functions.py::"
MEETING = "tests/comm/test_meeting.py::"

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
    Exercise(
        name="rendezvous",
        title="A rendezvous at the store",
        notebook="01_ranks",
        target="comm.membership.meeting.claim",
        also=("comm.membership.meeting.note_arrivals", "comm.membership.meeting.wait_for_all"),
        tests=(
            MEETING + "test_ranks_find_each_other_at_a_store",
            MEETING + "test_only_one_of_two_processes_gets_a_rank",
            MEETING + "test_a_rank_that_comes_with_another_world_size_is_refused",
            MEETING + "test_no_rank_goes_on_before_all_have_reached_a_stage",
            MEETING + "test_ranks_that_do_not_reach_a_stage_are_named_at_the_deadline",
        ),
        difficulty=3,
        minutes=40,
        doc="""
            Write `me` to the store under this rank's key. CommError if another process was there first.

            The store is a key-value server for all ranks. store.compare_set(key, "", text) writes the text if
            the key has no value, and returns, as bytes, the value that the key has then. The key is
            `rank/{rank}`, and the value is `me` as JSON, with "host" and "pid". If another process is there,
            raise give_up(store, rank, sentence), which tells the sentence to all other ranks, too: "Two
            processes claim rank {rank}: process {pid} on {host} and process {pid} on {host}; give each its
            own RANK."
        """,
        docs={
            "note_arrivals": """
                Add to `present` the entries of ranks that have come since the last call, by rank.

                store.check([key]) returns whether the key has a value, and store.get(key) returns the value.
                If an entry has another "world_size", give up with the sentence "Rank {rank} was started with
                WORLD_SIZE {world_size}, but rank {peer} with {its world size}; all ranks need the same."
            """,
            "wait_for_all": """
                Return when all ranks have called this with the same `stage`.

                store.set(key, "") writes a key, `{stage}/{rank}`. `_absent` returns the ranks whose key is
                missing. Sleep `_POLL / 10` seconds between two looks, and call raise_if_given_up(store, rank)
                before each, because another rank may have found an error. After the deadline, a value of
                time.monotonic(), give up: "The group cannot form: {_ranks(missing)} {_STUCK}."
            """,
        },
        hints=(
            "Two processes that first look whether a key is free, and then write, may both find it free. "
            "compare_set looks and writes in one step, so exactly one of them wins.",
            "compare_set returns bytes: compare its decoded result with your own text. If they are equal, "
            "the place is yours. store.get waits for a key that is missing, so ask with store.check first.",
            "A barrier on a store: write your own key, then loop while `_absent(store, world_size, stage)` "
            "is not empty. In the loop call raise_if_given_up, compare time.monotonic() with the deadline, "
            "sleep.",
        ),
    ),
    Exercise(
        name="byte_stream",
        title="A byte stream over a socket that does not block",
        notebook="03_cost_of_a_message",
        page="comm/transport/README.md",
        target="comm.transport.stream_ends.StreamOut.push",
        also=("comm.transport.stream_ends.StreamIn.receive",),
        tests=(
            "tests/comm/test_stream_ends.py::test_what_the_kernel_does_not_take_at_once_leaves_later_and_in_order",
            "tests/comm/test_stream_ends.py::test_a_message_is_done_when_the_kernel_has_its_last_byte_and_not_before",
            "tests/comm/test_stream_ends.py::test_a_push_tells_whether_the_kernel_has_taken_anything",
            "tests/comm/test_stream_ends.py::test_a_receiver_takes_what_is_there_and_does_not_wait_for_more",
            "tests/comm/test_stream_ends.py::test_a_receiver_is_told_that_its_sender_has_gone",
            "tests/comm/test_stream_ends.py::test_the_error_of_a_lost_connection_leaves_push_and_receive",
            "tests/comm/test_stream_ends.py::test_a_tree_broadcast_and_other_patterns_run_over_sockets",
        ),
        difficulty=3,
        minutes=30,
        needs=("tree_broadcast",),
        doc="""
            Give bytes of the first message to the kernel. Return whether it has taken any. Raise OSError.

            `self._queue` has a pair (data, transfer) for each message that has not left completely, the first
            one in front. The queue may be empty: return False. `self.socket.send(data)` gives bytes to the
            kernel, and returns how many it has taken, which may be fewer than all. If it cannot take any now,
            `send` raises BlockingIOError, and `push` returns False. Let any other error leave the function:
            the connection is lost, and the caller must know.

            When the kernel has taken the last byte of a message, set `transfer.done` to True and take the
            message that has left from the queue. If it has taken fewer bytes, the rest stays in front.

            Call `send` once: the caller pushes again. The lesson's function is faster where many messages
            wait, because it gives the kernel up to _MOST_AT_ONCE messages with one `self.socket.sendmsg`,
            which takes a list of them. You need use neither.
        """,
        docs={
            "receive": """
                Fill the beginning of `into` with the next bytes. Return how many, 0 for none yet.

                `self.socket.recv_into(into)` takes what has arrived, but no more than fits into `into`, and
                returns the number of bytes. If nothing has arrived yet it raises BlockingIOError. It returns
                0 if the sender has closed the connection: raise ConnectionError then. Let any other error
                leave the function. `message_bytes` is the length of the full message, and is of no use here.
            """,
        },
        hints=(
            "A socket that does not block takes a part of a message, or nothing. What it has not taken must "
            "be the first thing that it gets at the next call. So `push` changes the queue only by the bytes "
            "that `send` says it has taken.",
            "A part of a memoryview is a memoryview: `data[sent:]` copies nothing. If fewer bytes were taken "
            "than the message has, put the rest back in front with `self._queue[0] = data[sent:], transfer`. "
            "Else take the message from the queue, and set its transfer's `done`.",
            "`push`: with an empty queue return False. Call `send` in a `try`; at `BlockingIOError`, and at "
            "no other error, return False. Then handle what was sent, and return True: one message for each "
            "call is enough. `receive`: call `recv_into` in a `try`, return 0 at `BlockingIOError`, and "
            "raise ConnectionError if it has returned 0.",
        ),
    ),
)
