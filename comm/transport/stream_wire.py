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
from lab.trace.ledger import HEADER, LEDGER


class StreamTransfer(Transfer):
    def __init__(
        self, wire: Wire, streams: Streams, tensor: torch.Tensor, peer: int, verb: str, header: bool = False
    ) -> None:
        super().__init__(wire, None, tensor, peer, verb, header)
        self._streams = streams
        self.done = not tensor.nbytes  # an empty tensor is not sent

    def wait(self) -> None:
        if not self._header:
            self._wire.finish_handshake()
        if not self.done:
            self._streams.move_until(self, self._peer, self._verb)
        if self.copy_to is not None:
            place, self.copy_to = self.copy_to, None
            place.copy_(self.tensor)


class StreamWire(Wire):
    receives_ahead = 2  # segments whose receives are posted at a time: the others wait in the stream

    def __init__(self, group: Group, transport: str, op: str, pattern: str, sequence: int) -> None:
        super().__init__(group, op, pattern)
        self.streams: Streams = streams_of(group, transport, op, pattern, sequence)
        self.streams.what = f"{op} ({pattern})"
        self._deferred: list[Callable[[], None]] = []

    def finish_handshake(self) -> None:
        if self.check is not None:
            super().finish_handshake()
            deferred, self._deferred = self._deferred, []  # they refer to this wire, which should be freed
            for post in deferred:
                post()

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> StreamTransfer:
        check_peer(self.op, self.pattern, self.rank, self.size, peer, verb)
        transfer = StreamTransfer(self, self.streams, tensor, peer, verb, header)
        if transfer.done:
            return transfer
        sends = verb == "send to"
        post = self.streams.post_send if sends else self.streams.post_receive
        if sends:
            LEDGER.count(self.op, HEADER if header else self.pattern, tensor.nbytes, axis=self.axis)
        is_deferred = self.check is not None and not header
        if is_deferred and sends:
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
