"""A tree broadcast on your own transport. Write `StreamOut.push` and `StreamIn.receive` of
comm/transport/stream_ends.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/transport/stream_ends.py yet: it contains
the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    _MOST_AT_ONCE = 8
    self._queue: deque[tuple[memoryview, Done]]
    self.socket: socket.socket

Check it with `python -m exercises check byte_stream`.
"""

from comm.transport.stream_ends import _MOST_AT_ONCE


def push(self) -> bool:
    """Give the kernel as much as it takes. Return whether it has taken anything. Raise OSError.

    `self._queue` has a pair (data, transfer) for each message that has not left completely, the first
    one in front. `self.socket.send(data)` gives bytes to the kernel, and returns how many it has
    taken, which may be fewer than all. If it cannot take any now, `send` raises BlockingIOError.
    `transfer.done` becomes true when the kernel has taken the last byte of a message. The caller
    wants to see other errors, such as that of a lost connection.

    One message in each call is enough. `self.socket.sendmsg` takes a list of several.
    """
    raise NotImplementedError(
        "A tree broadcast on your own transport is not written yet: `StreamOut.push` has no body."
    )


def receive(self, into: memoryview, message_bytes: int) -> int:
    """Fill the beginning of `into` with the next bytes of a message. Return how many, 0 for none.

    `self.socket.recv_into(into)` takes what has arrived, but no more than fits into `into`, and
    returns the number of bytes. If nothing has arrived it raises BlockingIOError. It returns 0 if
    the sender has closed the connection: raise ConnectionError then. `message_bytes` is the
    length of the full message, and is of no use here.
    """
    raise NotImplementedError(
        "A tree broadcast on your own transport is not written yet: `StreamIn.receive` has no body."
    )
