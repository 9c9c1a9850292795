"""Name what algorithms and the handshake use of a wire, so that several kinds of wires fit."""

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Member(Protocol):
    """The place of this rank in a group, and the operation that it does there."""

    op: str
    pattern: str
    rank: int
    size: int


class AnyWire(Member, Protocol):
    """The interface of a Wire and of a StreamWire (stream_wire.py) for algorithms and the handshake."""

    group: dist.ProcessGroup

    def isend(self, tensor: torch.Tensor, dst: int, header: bool = False) -> Any: ...
    def irecv(self, tensor: torch.Tensor, src: int, header: bool = False) -> Any: ...
