"""What a collective reads and writes, on its way to the wire and back.

On the wire a tensor is flat, contiguous and in host memory. Most are that already, and then nothing is
copied; a strided view or a tensor on a GPU is copied there, and back if the collective writes it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm.transport.wire import Group


def goes_by_host(tensor: torch.Tensor, group: Group) -> bool:
    """Return whether the tensor is on a GPU and its group speaks gloo, which sends what is in host memory.

    torch's CUDA builds copy a GPU's tensors to the host for gloo's collectives themselves, but not for plain
    messages; done here, it is the same in all of them.
    """
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


@dataclass(frozen=True)
class In:
    """A tensor that a collective only reads. On the wire it is divided by `divisor`, in a copy."""

    tensor: torch.Tensor
    divisor: int = 1

    def to_wire(self) -> torch.Tensor:
        host = self.tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        flat = host.as_strided((host.numel(),), (1,))  # a single element may have any stride
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
