"""A byte stream over a socket that does not block. Write `StreamOut.push` and `StreamIn.receive` of
comm/transport/stream_ends.py.

Read notebooks/03_cost_of_a_message.ipynb first, then comm/transport/README.md. Do not open
comm/transport/stream_ends.py yet: it contains the solution.

You may use:

    _MOST_AT_ONCE = 8
    self._queue: deque[tuple[memoryview, Done]], self.socket: socket.socket

Check it with `python -m exercises check byte_stream`.
"""

from comm.transport.stream_ends import _MOST_AT_ONCE


def push(self) -> bool:
    """Give bytes of the first message to the kernel. Return whether it has taken any. Raise OSError.

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
    """
    raise NotImplementedError("`StreamOut.push` is not written yet.")


def receive(self, into: memoryview, message_bytes: int) -> int:
    """Fill the beginning of `into` with the next bytes. Return how many, 0 for none yet.

    `self.socket.recv_into(into)` takes what has arrived, but no more than fits into `into`, and
    returns the number of bytes. If nothing has arrived yet it raises BlockingIOError. It returns
    0 if the sender has closed the connection: raise ConnectionError then. Let any other error
    leave the function. `message_bytes` is the length of the full message, and is of no use here.
    """
    raise NotImplementedError("`StreamIn.receive` is not written yet.")
