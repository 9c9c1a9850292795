"""A loop that moves all messages. Write `Streams._move` of comm/transport/streams.py.

Read notebooks/03_cost_of_a_message.ipynb first. Then read comm/transport/README.md: the notebook does not
tell of this. Do not open comm/transport/streams.py yet: it contains the solution. All that you need is in
this file, on that page and in the hints.

You may use:

    peer.has_left
    peer.out: StreamOut | MemoryOut | None
    peer.pull() -> bool
        Take what has arrived, up to the end of one message.
    self._all
    self._deadline
        Until which something has to move, 0 after something has moved.

Check it with `python -m exercises check move_all_messages`.
"""


def _move(self) -> bool:
    """Move what can be moved of any message, without waiting. Return whether anything has moved.

    A rank that waits calls this until the awaited message is done. `self._all` is a list of all
    other ranks' `Peer`s. `peer.out` is the end of the connection to that rank, or None before the
    first message to it. `peer.out.push()` gives messages to the kernel or to shared memory, and
    `peer.pull()` takes what has arrived. Each of them returns whether anything has moved, and
    neither waits.

    Both raise OSError if the connection is lost. Then set `peer.has_left`, which counts as a
    movement the first time, and go on with the other peers. Nothing can be pushed to a peer that has
    left, but what it had sent before is still there to be pulled. If anything has moved, set
    `self._deadline` to 0.0: the time until the timeout begins again.
    """
    raise NotImplementedError(
        "A loop that moves all messages is not written yet: `Streams._move` has no body."
    )
