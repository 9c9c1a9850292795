"""Models and full tensors of tensor parallel models, by the plain model's names."""

from typing import Any

import torch
from torch import Tensor

from comm.functions import InFlightAllGather
from lab.models.model import GPT, GPTConfig
from tensor_parallel.parallelize import TensorParallel


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """Make a GPT whose 12 heads 1 to 4 ranks divide, and whose vocabulary they do not."""
    sizes = {"vocab_size": 61, "block_size": 16, "num_layers": 2, "num_heads": 12, "width": 24}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def text(time: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (4, time + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def gathered(part: Tensor, dim: int) -> Tensor:
    """Return the full tensor of all ranks' shards."""
    return InFlightAllGather(part.detach(), dim, None).wait()


def full_tensors(model: TensorParallel, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the full tensors by the plain model's names."""
    return {name: None if t is None else model.full_tensor(name, t) for name, t in tensors.items()}
