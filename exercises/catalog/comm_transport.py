"""Exercises of lesson 1, third part: how the bytes of messages get from one rank to another."""

from exercises.catalog.exercise import Exercise

ENDS = "tests/comm/test_stream_ends.py::"
MEMORY = "tests/comm/test_memory_ends.py::"
ORDER = "tests/comm/test_ring_buffer.py::"
PROGRESS = "tests/comm/test_progress.py::"
PAGE = "comm/transport/README.md"

EXERCISES = (
    Exercise(
        name="byte_stream",
        title="A byte stream over a socket that does not block",
        notebook="03_cost_of_a_message",
        page=PAGE,
        target="comm.transport.stream_ends.StreamOut.push",
        also=("comm.transport.stream_ends.StreamIn.receive",),
        tests=(
            ENDS + "test_what_the_kernel_does_not_take_at_once_leaves_later_and_in_order",
            ENDS + "test_a_message_is_done_when_the_kernel_has_its_last_byte_and_not_before",
            ENDS + "test_a_push_tells_whether_the_kernel_has_taken_anything",
            ENDS + "test_a_receiver_takes_what_is_there_and_does_not_wait_for_more",
            ENDS + "test_a_receiver_is_told_that_its_sender_has_gone",
            ENDS + "test_the_error_of_a_lost_connection_leaves_push_and_receive",
            ENDS + "test_a_tree_broadcast_and_other_patterns_run_over_sockets",
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
    Exercise(
        name="ring_buffer",
        title="A ring buffer in shared memory",
        notebook="03_cost_of_a_message",
        page=PAGE,
        target="comm.transport.memory_ends.write_to_ring",
        also=("comm.transport.memory_ends.read_from_ring", "comm.transport.memory_ends.MemoryIn._take"),
        tests=(
            MEMORY + "test_a_message_that_goes_over_the_end_of_the_ring_buffer_goes_on_at_its_beginning",
            MEMORY + "test_space_in_the_ring_buffer_is_free_only_after_its_bytes_were_copied",
            MEMORY + "test_a_rank_makes_its_counter_visible_before_it_looks_whether_the_other_one_sleeps",
            MEMORY + "test_messages_of_all_sizes_arrive_bit_by_bit_and_in_order[False]",
            ORDER + "test_a_receiver_copies_after_it_has_looked_and_frees_after_it_has_copied",
            ORDER + "test_a_receiver_with_nothing_to_take_stores_nothing_and_wakes_no_rank",
        ),
        difficulty=2,
        minutes=25,
        needs=("byte_stream",),
        doc="""
            Copy `data` to the ring buffer `ring`, of RING_BYTES bytes, behind what was written last.

            `position` is the number of all bytes that were ever written before, and byte k of the stream lies
            at position k modulo RING_BYTES. The caller has made sure that there is space. It counts the bytes
            and publishes the count afterwards, with the fences that this takes, and only then the receiver
            looks at them.
        """,
        docs={
            "read_from_ring": """
                Fill `into` with the bytes of the ring buffer that were written from `position` on.

                The caller has made sure that they are there.
            """,
            "_take": """
                Fill the beginning of `into` with bytes out of the ring buffer. Return how many, 0 for none.

                `read_from_ring` copies them out of `self._ring`, the memory of the ring buffer. `self._tail`
                is the number of all bytes that were ever taken, and `self._words[HEAD]` that of all bytes
                that were written. Take no more than there are, and no more than fit into `into`. If there are
                none, return 0 and do nothing else. Publish the new tail in `self._words[TAIL]`: from then on
                the sender writes into that space. Then call `self._wake_sender()`, which makes the counter
                visible, and wakes the sender if it sleeps.

                Call `fence()` after you have read HEAD and before you read the bytes, and again after the
                copy and before you store TAIL: otherwise a processor may show the sender the new tail while
                bytes are still being read.
            """,
        },
        hints=(
            "A copy may go over the end of the buffer. Then it has two parts, one up to the end and one from "
            "position 0. Both ranks must divide it at the same byte.",
            "The copy begins at `start`, the count modulo RING_BYTES. Up to the end fit RING_BYTES - start "
            "bytes. `ring[a:b] = data[c:d]` copies; both sides must have the same length.",
            "`_take` takes min(HEAD - tail, len(into)) bytes, and returns 0 at once if there are none. The "
            "order counts: look at HEAD, fence(), copy, fence(), store the tail in "
            "self._words[TAIL], wake the sender. A tail that is stored before the copy has ended lets the "
            "sender overwrite what is still being copied.",
        ),
    ),
    Exercise(
        name="move_all_messages",
        title="A loop that moves all messages",
        notebook="03_cost_of_a_message",
        page=PAGE,
        target="comm.transport.streams.Streams._move",
        tests=(
            PROGRESS + "test_one_move_serves_all_peers_and_tells_whether_anything_has_moved",
            PROGRESS + "test_one_message_to_or_from_any_rank_is_a_movement",
            PROGRESS + "test_a_peer_to_which_nothing_was_ever_sent_stops_no_other_message",
            PROGRESS + "test_a_peer_that_is_found_to_have_left_is_a_movement_once",
            PROGRESS + "test_any_error_of_a_connection_says_that_the_peer_has_left",
            PROGRESS + "test_a_peer_that_has_left_stops_no_other_message_and_what_it_had_sent_arrives",
            PROGRESS + "test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_go_on",
        ),
        difficulty=2,
        minutes=20,
        needs=("byte_stream",),
        objects={"peer": "comm.transport.streams.Peer"},
        doc="""
            Move what can be moved of any message, without waiting. Return whether anything has moved.

            A rank that waits calls this until the awaited message is done. `self._all` is a list of all
            other ranks' `Peer`s. `peer.out` is the end of the connection to that rank, or None before the
            first message to it. `peer.out.push()` gives messages to the kernel or to shared memory, and
            `peer.pull()` takes what has arrived. Each of them returns whether anything has moved, and
            neither waits.

            Both raise OSError if the connection is lost. Then set `peer.has_left`, which counts as a
            movement the first time, and go on with the other peers. Nothing can be pushed to a peer that has
            left, but what it had sent before is still there to be pulled. If anything has moved, set
            `self._deadline` to 0.0: the time until the timeout begins again.
        """,
        hints=(
            "Two ranks that send each other a message that no buffer can hold: what has to happen on rank 1 "
            "before the last byte of rank 0's message can leave? Does your rank do that while it waits?",
            "In one call go through all peers, and for each of them push and also pull, whatever the push "
            "has returned. Collect the results with `moved |= ...`; `or` would leave out the second call if "
            "the first one has moved something.",
            "Put both calls into one `try` for each peer. Push only if peer.out is not None and the peer has "
            "not left. At OSError: `moved |= not peer.has_left`, then set peer.has_left. A push that raises "
            "skips the pull of this call. That is right only because the next call does not push to this "
            "peer, and pulls. After the loop set the deadline if anything has moved, and return `moved`.",
        ),
    ),
)
