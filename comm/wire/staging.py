"""Bring the tensors of a collective to the wire, and back.

On the wire a tensor is flat, contiguous and in host memory. Most tensors already are, and are not copied. A
strided view or a tensor on a GPU is copied to the wire, and back if the collective writes to it. The classes
are named as in MPI: In is read, Out is written, InOut is both.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm.wire.groups import Group


def goes_by_host(tensor: torch.Tensor, group: Group) -> bool:
    """Return whether the tensor is on a GPU and `group` uses gloo, which sends from host memory."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


@dataclass(frozen=True)
class In:
    """A tensor that a collective only reads. If `divisor` is not 1, the wire gets a divided copy."""

    tensor: torch.Tensor
    divisor: int = 1

    def to_wire(self) -> torch.Tensor:
        flat = self.flat(by_host=self.tensor.device.type != "cpu")
        return flat if self.divisor == 1 else flat / self.divisor

    def flat(self, by_host: bool) -> torch.Tensor:
        """Return the tensor flat and contiguous, as a view if it can be, and by host if asked."""
        tensor = self.tensor.detach()
        if by_host or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            tensor = (tensor.to("cpu") if by_host else tensor).resolve_conj().resolve_neg().contiguous()
        return tensor.as_strided((tensor.numel(),), (1,))  # a tensor of one element may have any stride

    def from_wire(self, flat: torch.Tensor) -> None:
        pass


class InOut(In):
    """A tensor that a collective reads and writes."""

    def from_wire(self, flat: torch.Tensor) -> None:
        if flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(flat.view(self.tensor.shape))


class Out(InOut):
    """A tensor that a collective only writes."""


def handover_of(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None] | None:
    """Return a context in which another thread may take the tensors, or None if all are in host memory."""
    for tensor in tensors:
        if tensor.is_cuda:
            return _taken(tensor.device, torch.cuda.current_stream(tensor.device).record_event())
    return None


@contextmanager
def _taken(device: torch.device, event: torch.cuda.Event) -> Iterator[None]:
    """Wait for what the caller has launched, run the block on the thread's own stream, and wait for that."""
    # A thread starts with device 0. To wait for an event there would open a context on that GPU, too.
    with torch.cuda.stream(_own_stream(device)):
        event.synchronize()
        yield
        torch.cuda.current_stream(device).synchronize()


_streams = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return this thread's stream: one, because the allocator keeps memory for each stream that was used."""
    if not hasattr(_streams, "of_device"):
        _streams.of_device = {}
    if device not in _streams.of_device:
        _streams.of_device[device] = torch.cuda.Stream(device)
    stream: torch.cuda.Stream = _streams.of_device[device]
    return stream
