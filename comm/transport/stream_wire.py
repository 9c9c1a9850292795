"""Send and receive the messages of one operation over streams (streams.py), as a Wire does over gloo.

      rank 0 ──► rank 1     [header][message][message]   [header][message] ...      one direction
                             operation 7                  operation 8

Each operation starts with the rows of its handshake (handshake.py). Its messages leave at once, while the
rows are on their way, and are read after the check of the headers. So the check costs two ranks no round of
its own. A message to a rank that gets a row in a later round of the handshake waits for that row: the
receiver expects the row first.
"""

from collections.abc import Callable

import torch

from comm.transport.streams import Streams, streams_of
from comm.wire.wire import Group, Transfer, Wire, bytes_of, check_peer
from lab.trace.ledger import LEDGER


class StreamTransfer(Transfer):
    """A message of a StreamWire in flight."""

    def __init__(
        self, wire: "StreamWire", tensor: torch.Tensor, peer: int, verb: str, header: bool = False
    ) -> None:
        super().__init__(wire, None, tensor, peer, verb, header)
        self._streams = wire.streams
        self.done = not tensor.nbytes  # an empty tensor is not sent

    def wait(self) -> None:
        if not self._header:
            self._wire.finish_handshake()
        if not self.done:
            self._streams.move_until(self, self._peer)


class StreamWire(Wire):
    """A Wire whose messages leave over the streams of its group."""

    receives_ahead = 2  # segments whose receives are posted at a time: the others wait in the stream

    def __init__(self, group: Group, transport: str, op: str, pattern: str, sequence: int) -> None:
        super().__init__(group, op, pattern)
        self.streams: Streams = streams_of(group, transport, op, pattern, sequence)
        self.streams.what = f"{op} ({pattern})"
        self._deferred: list[Callable[[], None]] = []

    @property
    def names(self) -> list[int]:
        return self.streams.names

    @property
    def full_numel(self) -> int:
        self.finish_handshake()
        return self._full_numel

    @full_numel.setter
    def full_numel(self, numel: int) -> None:
        self._full_numel = numel

    def finish_handshake(self) -> None:
        if self._check is not None:
            super().finish_handshake()
            deferred, self._deferred = self._deferred, []  # they refer to this wire, which should be freed
            for post in deferred:
                post()

    def isend(self, tensor: torch.Tensor, dst: int, header: bool = False) -> StreamTransfer:
        check_peer(self.op, self.pattern, self.rank, self.size, dst, "send to")
        transfer = StreamTransfer(self, tensor, dst, "send to", header)
        if transfer.done:
            return transfer
        LEDGER.count(self.op, "header" if header else self.pattern, tensor.nbytes, axis=self.axis)
        if header or not self._gets_a_later_row((self.rank - dst) % self.size):
            self.streams.post_send(dst, bytes_of(tensor), transfer)
        else:
            self._deferred.append(lambda: self.streams.post_send(dst, bytes_of(tensor), transfer))
        return transfer

    def irecv(self, tensor: torch.Tensor, src: int, header: bool = False) -> StreamTransfer:
        check_peer(self.op, self.pattern, self.rank, self.size, src, "receive from")
        transfer = StreamTransfer(self, tensor, src, "receive from", header)
        if transfer.done:
            return transfer
        if header or self._check is None:
            self.streams.post_receive(src, bytes_of(tensor), transfer)
        else:
            self._deferred.append(lambda: self.streams.post_receive(src, bytes_of(tensor), transfer))
        return transfer

    def _gets_a_later_row(self, distance: int) -> bool:
        """Return whether a rank gets its row from this one after the first round of the handshake."""
        return self._check is not None and distance > 1 and distance & (distance - 1) == 0

    def finish(self) -> None:
        """Return when the handshake has ended and all messages of this rank have left."""
        self.finish_handshake()
        self.streams.finish()
