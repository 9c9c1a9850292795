"""Compare the full gradients and parameters of tensor parallel models with one process, by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm.functions import InFlightAllGather
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.models.model import GPT, MLP, GPTConfig, loss_of
from tensor_parallel.parallelize import TensorParallel, parallelize
from tests.tensor_parallel.masks import FixedMasks, NoMasks

RTOL = 1e-9
BOTH_MODES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """Make a GPT whose 12 heads 1 to 4 ranks divide, and whose vocabulary they do not."""
    sizes = {"vocab_size": 61, "block_size": 16, "num_layers": 2, "num_heads": 12, "width": 24}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def text(time: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (4, time + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def gathered(part: Tensor, dim: int, size: int | None = None) -> Tensor:
    """Return the full tensor of all ranks' shards."""
    return InFlightAllGather(part.detach(), dim, None, size).wait()


def full_tensors(model: TensorParallel, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the full tensors by the plain model's names; one all-gather for all of them is quick."""
    cut = {name: tensor for name, tensor in tensors.items() if tensor is not None and name in model.dims}
    if not cut:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in cut.values()])
    result = dict(tensors)
    of_ranks = InFlightAllGather(flat, 0, model.group).wait().split(len(flat))
    parts = [each.split([tensor.numel() for tensor in cut.values()]) for each in of_ranks]
    for (name, tensor), of_one in zip(cut.items(), zip(*parts, strict=True), strict=True):
        dim, size = model.dims[name]
        result[name] = torch.cat([part.view_as(tensor) for part in of_one], dim).narrow(dim, 0, size)
    return result


def compare_with_one_process(
    cluster: Cluster,
    sequence_parallel: bool = False,
    time: int = 12,
    clip: float | None = None,
    steps: int = 5,
    frozen: Sequence[str] = (),
    overlap: bool = True,
    **changes: Any,
) -> None:
    """Compare every gradient in each step of SGD, and every parameter after the steps.

    Dropout has fixed masks (masks.py). `frozen` lists prefixes of the names of frozen parameters.
    """
    what = f"{changes}, {time} tokens, sequence_parallel {sequence_parallel}, {cluster.world_size} ranks"
    reference, plain = (gpt(seed, **changes).to(cluster.device) for seed in (0, cluster.rank))
    for model in (reference, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
    ours = parallelize(plain, None, sequence_parallel, overlap)
    assert_same(
        full_tensors(ours, parameters(ours.module)), parameters(reference), 0, f"initial parameter, {what},"
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, ours)]
    masks = FixedMasks() if changes.get("dropout") else NoMasks()
    x, y = (part.to(cluster.device) for part in text(time))
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with masks.forward(step, ""):
            expected_loss = loss_of(reference(x), y)
        expected_loss.backward()
        with masks.forward(step, "tokens" if sequence_parallel else "heads"):
            loss = ours.loss(ours(x), y)
        loss.backward()
        ours.finish_gradient_sync()
        assert_same({"loss": loss.detach()}, {"loss": expected_loss.detach()}, RTOL, what)
        if clip is not None:
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert_same({"norm": ours.clip_grad_norm_(clip)}, {"norm": expected_norm}, RTOL, what)
        assert_same(
            full_tensors(ours, gradients(ours.module)),
            gradients(reference),
            RTOL,
            f"gradient, {what}, step {step},",
        )
        for optimizer in optimizers:
            optimizer.step()
    assert_same(
        full_tensors(ours, parameters(ours.module)), parameters(reference), RTOL, f"parameter, {what},"
    )


def compare_mlp_with_one_process(
    cluster: Cluster, sizes: Sequence[int], clip: float | None = None, steps: int = 5
) -> None:
    """Compare an MLP with one process; its input requires a gradient in every second step."""
    what = f"MLP {sizes} on {cluster.world_size} ranks"
    random = torch.Generator().manual_seed(3)
    batch = torch.randn(5, sizes[0], generator=random).double()
    targets = torch.randint(sizes[-1], (5,), generator=random)
    reference, ours = MLP(sizes, 0).double(), parallelize(MLP(sizes, cluster.rank).double())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, ours)]
    for step in range(steps):
        inputs = [batch.clone().requires_grad_(step % 2 == 1) for _ in range(2)]
        for model, optimizer, x in zip((reference, ours), optimizers, inputs, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), targets).backward()
        ours.finish_gradient_sync()
        if clip is not None:
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert_same({"norm": ours.clip_grad_norm_(clip)}, {"norm": expected_norm}, RTOL, what)
        expected, actual = gradients(reference), full_tensors(ours, gradients(ours.module))
        expected["input"], actual["input"] = inputs[0].grad, inputs[1].grad
        assert_same(actual, expected, RTOL, f"gradient, {what}, step {step},")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(
        full_tensors(ours, parameters(ours.module)), parameters(reference), RTOL, f"parameter, {what},"
    )
