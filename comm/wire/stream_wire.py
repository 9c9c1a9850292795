"""Send and receive the messages of one operation over streams (streams.py), as a Wire does over gloo.

      rank 0 ──► rank 1     [header][message][message]   [header][message] ...      one direction
                             operation 7                  operation 8

Each operation starts with the rows of its handshake (handshake.py). Its messages leave at once, while the
rows are on their way, and are read after the check of the headers. So the check costs two ranks no round of
its own. A message to a rank that gets a row in a later round of the handshake waits for that row: the
receiver expects the row first.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.wire.groups import Group
from comm.wire.streams import Streams, message_streams_of, streams_of
from comm.wire.wire import POINT_TO_POINT, Transfer, Wire


class StreamTransfer(Transfer):
    def __init__(
        self, wire: Wire, streams: Streams, tensor: torch.Tensor, peer: int, verb: str, header: bool = False
    ) -> None:
        super().__init__(wire, tensor, peer, verb, header)
        self._streams = streams
        self.done = not tensor.nbytes  # an empty tensor is not sent

    def wait(self) -> None:
        if not self._header:
            self._wire.finish_handshake()
        if not self.done:
            self._streams.move_until(self, self._peer, self._verb)


class StreamWire(Wire):
    def __init__(self, group: Group, transport: str, op: str, pattern: str, sequence: int) -> None:
        super().__init__(group, op, pattern)
        self.streams = streams_of(group, transport, op, pattern, sequence)
        self.streams.what = f"{op} ({pattern})"
        self._deferred: list[Callable[[], None]] = []

    def finish_handshake(self) -> None:
        if self.check is not None:
            super().finish_handshake()
            deferred, self._deferred = self._deferred, []  # they refer to this wire, which should be freed
            for post in deferred:
                post()

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> Transfer:
        transfer = StreamTransfer(self, self.streams, tensor, peer, verb, header)
        if transfer.done:
            return transfer
        post = self.streams.post_send if verb == "send to" else self.streams.post_receive
        is_deferred = self.check is not None and not header
        if is_deferred and verb == "send to":
            distance = (self.rank - peer) % self.size
            is_deferred = distance > 1 and distance & (distance - 1) == 0  # its row leaves in a later round
        if is_deferred:
            self._deferred.append(lambda: post(peer, bytes_of(tensor), transfer))
        else:
            post(peer, bytes_of(tensor), transfer)
        return transfer

    def finish(self) -> None:
        self.finish_handshake()
        self.streams.finish()


class MessageWire(Wire):
    """A wire for point-to-point messages, which have connections of their own and no handshake."""

    def __init__(self, group: dist.ProcessGroup, transport: str, counted: bool) -> None:
        super().__init__(group, POINT_TO_POINT, "direct", counted)
        self._transport = transport

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> Transfer:
        if not tensor.is_contiguous():
            raise CommError(f"{self.op}: call contiguous() on the tensor to {verb} a rank first.")
        streams = message_streams_of(self.group, self._transport)
        transfer = StreamTransfer(self, streams, tensor, peer, verb)
        if not transfer.done:
            post = streams.post_send if verb == "send to" else streams.post_receive
            post(peer, bytes_of(tensor), transfer)
            streams.move_in_background()
        return transfer


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the tensor's memory. (`numpy()` would keep the storage from being freed.)"""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
