"""Bring the tensors of a collective to the wire, and back.

On the wire a tensor is flat, contiguous and in host memory. Most tensors already are, and are not copied. A
strided view or a tensor on a GPU is copied to the wire, and back if the collective writes to it. The classes
are named as in MPI: In is read, Out is written, InOut is both.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm.wire.wire import Group


def goes_by_host(tensor: torch.Tensor, group: Group) -> bool:
    """Return whether the tensor is on a GPU and `group` uses gloo, which sends from host memory.

    torch's CUDA builds copy such a tensor to the host in gloo's collectives, but not in plain messages. Here
    it is copied in both.
    """
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


@dataclass(frozen=True)
class In:
    """A tensor that a collective only reads. If `divisor` is not 1, the wire gets a divided copy."""

    tensor: torch.Tensor
    divisor: int = 1

    def to_wire(self) -> torch.Tensor:
        host = self.tensor.detach()
        if host.device.type != "cpu" or host.is_conj() or host.is_neg() or not host.is_contiguous():
            host = host.to("cpu").resolve_conj().resolve_neg().contiguous()
        flat = host.as_strided((host.numel(),), (1,))  # a tensor of one element may have any stride
        return flat if self.divisor == 1 else flat / self.divisor

    def from_wire(self, wired: torch.Tensor) -> None:
        pass


class InOut(In):
    """A tensor that a collective reads and writes."""

    def from_wire(self, wired: torch.Tensor) -> None:
        if wired.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(wired.view(self.tensor.shape))


class Out(InOut):
    """A tensor that a collective only writes."""
