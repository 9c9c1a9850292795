"""Read DTensors in tests."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensors(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the tensors with each DTensor replaced by its full tensor."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
