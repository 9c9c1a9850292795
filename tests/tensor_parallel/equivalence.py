"""Tensor parallel models against one process: gradients and parameters, whole, by name."""

from typing import Any

import torch
from torch import Tensor, nn

from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.model import GPT, GPTConfig, loss_of
from tensor_parallel.functions import Gathering
from tensor_parallel.parallelize import TensorParallel, parallelize

RTOL = 1e-9


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """12 heads, which 1 to 4 ranks divide, and a vocabulary that they do not."""
    sizes = {"vocab_size": 61, "block_size": 16, "num_layers": 2, "num_heads": 12, "width": 24}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def text(time: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (4, time + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def whole(model: TensorParallel, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The ranks' parts put together, by the names of the plain model."""
    result: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        if tensor is not None and name in model.dims:
            dim, size = model.dims[name]
            tensor = Gathering(tensor, dim, model.group).wait().narrow(dim, 0, size)
        result[name] = tensor
    return result


def compare_with_one_process(
    cluster: Cluster,
    sequence_parallel: bool = False,
    time: int = 12,
    clip: float | None = None,
    steps: int = 5,
    **changes: Any,
) -> None:
    """Every gradient at each of some SGD steps, and every parameter after them."""
    what = f"{changes}, {time} tokens, sequence_parallel {sequence_parallel}, {cluster.world_size} ranks"
    reference, ours = gpt(0, **changes), parallelize(gpt(cluster.rank, **changes), None, sequence_parallel)
    assert_same(whole(ours, parameters(ours.module)), parameters(reference), 0, f"initial parameter, {what},")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, ours)]
    x, y = text(time)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected_loss = loss_of(reference(x), y)
        expected_loss.backward()
        loss = ours.loss(ours(x), y)
        loss.backward()
        ours.finish_gradient_sync()
        assert_same({"loss": loss.detach()}, {"loss": expected_loss.detach()}, RTOL, what)
        if clip is not None:
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert_same({"norm": ours.clip_grad_norm_(clip)}, {"norm": expected_norm}, RTOL, what)
        assert_same(
            whole(ours, gradients(ours.module)), gradients(reference), RTOL, f"gradient, {what}, step {step},"
        )
        for optimizer in optimizers:
            optimizer.step()
    assert_same(whole(ours, parameters(ours.module)), parameters(reference), RTOL, f"parameter, {what},")
