"""List what to look at by what a failed assertion says, where bytes do not move as they should.

An entry has a regular expression that the message of an assertion or of an error may contain, and a sentence.
The first entry counts.
"""

_BOTH_WAYS = (
    "One call serves every peer in both directions, whatever happens with another one: is a push or a pull "
    "left out? `a or b` leaves out `b` where `a` is true."
)
_NOT_NOW = (
    'Only BlockingIOError means "not now". Any other error says that the peer is lost, and must leave the '
    "function."
)
_VISIBLE = (
    "A processor may look before its own earlier store is visible to others, and then two ranks sleep that "
    "should wake each other: is there a fence between each store and the look that follows it"
)

OF_OWNERSHIP = (
    (
        "has changed a tensor before its send|has ended before its send",
        "A tensor that is being sent belongs to the transport until `wait()` of its send has returned: is "
        "something added or received into it before that, or is it given back to the caller?",
    ),
    (
        "before the receiver had (copied|read) it",
        "Memory is used again while another rank still reads it: is it called free before all of it has been "
        "copied, and not after?",
    ),
)

OF_STREAMS = (
    (
        r"\d bytes were posted, and \d+ have left",
        "The kernel may take only a part of a message. Exactly that part must leave the queue, and the rest "
        "must be the next that leaves.",
    ),
    (
        "of the stream is not the one that was posted",
        "A stream has no tags, so the order counts: the rest of a message must leave before any other "
        "message does.",
    ),
    (
        r"and the message that ends at byte \d+ is",
        "A message is done when all of its bytes have been taken: is `done` set at that moment, and for each "
        "message that one call has finished?",
    ),
    (
        r"a push .*returns|push \d+, of which .* returns",
        "The caller sleeps when nothing has moved: does the result say whether any byte was taken?",
    ),
    (
        r"can be taken, but `receive` returns",
        "`receive` returns how many bytes it has put at the beginning of `into`: those that have arrived, "
        "and not those that it was asked for.",
    ),
    (
        "has closed the connection, and `receive` returns",
        "No bytes yet and no bytes ever again are two things. The second one must be an error, or this rank "
        "waits for a rank that has gone.",
    ),
    ("the connection is lost, and `(push|receive)` returns", _NOT_NOW),
)

OF_PROGRESS = (
    (
        "has not arrived, which it sent before it left",
        "A push to a peer that has left raises in each call, and an error skips what follows in the same "
        "`try`: is nothing pushed to this peer any more, and is it pulled from all the same?",
    ),
    (r"a message (was not sent|was not received|of rank \d+ has not arrived)", _BOTH_WAYS),
    (
        r"only a message (to|from) rank \d+ could move, and `_move` returns",
        "A movement of any peer counts: is an earlier result overwritten by that of the next call "
        "(`moved = ...`)?",
    ),
    (
        "nothing was posted, and `_move`|all that could move has moved before",
        "`_move` says whether a push or a pull of this one call has moved something. Does it count a call "
        "that has returned False?",
    ),
    (
        "^messages have moved",
        "`_move` says whether a push or a pull of this one call has moved something: is the result of each "
        "of them collected, and returned?",
    ),
    (
        "a peer that has left moves nothing",
        "Each later call raises again: does it count only the first time, and is nothing pushed to a peer "
        "that has left?",
    ),
    (
        r"is found to have left, and `_move` returns|and its `has_left` is not set",
        "An error of a push or of a pull says that the peer has left. The first one counts as a movement, "
        "because the caller must look again: is `has_left` set after it was asked, and not before?",
    ),
    (
        r"nothing has moved, and `_deadline`",
        "`_deadline` stays as it is while nothing moves. Else a peer that has stopped would be awaited "
        "without a timeout.",
    ),
    (
        r"something has moved, and `_deadline`",
        "The time until the timeout begins again when anything has moved, and 0.0 says so: is `_deadline` "
        "set after all peers had their turn, whichever of them has moved something?",
    ),
    (
        "'NoneType' object has no attribute '(push|is_busy)'|there is no connection to it yet",
        "`peer.out` is None before the first message to a peer.",
    ),
    (
        "No route to host",
        "A lost connection can be any OSError, not only a ConnectionError: is each of them caught, of the "
        "push and of the pull?",
    ),
)

OF_RING_BUFFERS = (
    (
        r"after a receive words\[TAIL\] is",
        "Both count all bytes that were ever taken, and never start again: `self._tail` for this rank, and "
        "`self._words[TAIL]` for the sender. Does each receive change both?",
    ),
    (
        "bytes have arrived, and nothing moves any more",
        "Each rank looks at what the other one has counted: does each count all bytes that it has copied, "
        "never modulo, and publish the count where the other one looks? And does `_take` also return a part "
        "of what was asked for?",
    ),
    (
        r"message \d+, of \d+ bytes, is not as it was sent",
        "Do both ranks begin at the same byte, and is nothing taken that has not been written yet?",
    ),
    (
        "lvalue and rvalue have different structures",
        "The two slices have different lengths: does the copy go over the end of the buffer, or past the end "
        "of `into`?",
    ),
    (
        "one push moves the counter once",
        "The counter says that bytes are there which have not been copied yet. `push` publishes it, after "
        "all of its copies.",
    ),
    (
        "what is freed must be visible before the look",
        f"{_VISIBLE}, and is `_wake_sender()`, which has both, called after the counter is stored?",
    ),
    ("must be visible before the look", f"{_VISIBLE}?"),
    (
        "no fence between the look and the copy",
        "A processor may read the bytes before the counter that says that they are there: is there a fence "
        "between the look at HEAD and the copy?",
    ),
    (
        "no fence between the copy and the store",
        "A processor may make the new tail visible before the copy has ended: is there a fence between the "
        "copy and the store of the tail?",
    ),
    (
        "the ring buffer is empty, and `_take`",
        "Without new bytes there is nothing to free, and no reason to wake the sender: does `_take` return 0 "
        "before it stores anything?",
    ),
    (
        "fit before the end of the ring buffer",
        "The position in a ring buffer is the number of all bytes so far, modulo its size. How many bytes "
        "fit before the end, and do the others go on at the beginning, for the sender and for the receiver?",
    ),
)

OF_TRANSPORTS = OF_OWNERSHIP + OF_STREAMS + OF_PROGRESS + OF_RING_BUFFERS
