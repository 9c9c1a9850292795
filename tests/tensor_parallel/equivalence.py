"""Compare the full gradients and parameters of tensor parallel models with one process, by name."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comm.functions import InFlightAllGather
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, MLP, GPTConfig, loss_of
from tensor_parallel.parallelize import TensorParallel, parallelize
from tests.one_process import RTOL, train_both


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


def compare_with_one_process(
    cluster: Cluster,
    sequence_parallel: bool = False,
    time: int = 12,
    clip: float | None = None,
    steps: int = 2,
    frozen: Sequence[str] = (),
    overlap: bool = True,
    **changes: Any,
) -> None:
    """Compare a GPT in each step of SGD. `frozen` lists prefixes of the names of frozen parameters."""
    what = f"{changes}, {time} tokens, sequence_parallel {sequence_parallel}, {cluster.world_size} ranks"
    reference, plain = (gpt(seed, **changes).to(cluster.device) for seed in (0, cluster.rank))
    for model in (reference, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
    x, y = (part.to(cluster.device) for part in text(time))
    _compare(reference, parallelize(plain, None, sequence_parallel, overlap), x, y, steps, clip, what)


def compare_mlp_with_one_process(cluster: Cluster, sizes: Sequence[int], clip: float | None = None) -> None:
    """Compare an MLP in two steps of SGD; in the second one its input requires a gradient."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(5, sizes[0], generator=random).double()
    y = torch.randint(sizes[-1], (5,), generator=random)
    reference, ours = MLP(sizes, 0).double(), parallelize(MLP(sizes, cluster.rank).double())
    _compare(reference, ours, x, y, 2, clip, f"MLP {sizes} on {cluster.world_size} ranks")


def _compare(
    reference: nn.Module,
    ours: TensorParallel,
    x: Tensor,
    y: Tensor,
    steps: int,
    clip: float | None,
    what: str,
) -> None:
    """Compare the loss and an input's gradient in each step, with `clip` the norm, and as train_both does."""

    def backward(step: int) -> None:
        inputs = [x.clone().requires_grad_(x.is_floating_point() and step == 1) for _ in range(2)]
        expected_loss, loss = loss_of(reference(inputs[0]), y), ours.loss(ours(inputs[1]), y)
        for one in (expected_loss, loss):
            one.backward()
        ours.finish_gradient_sync()
        expected, actual = ({"loss": one.detach()} for one in (expected_loss, loss))
        expected["input"], actual["input"] = (each.grad for each in inputs)
        if clip is not None:
            expected["norm"] = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            actual["norm"] = ours.clip_grad_norm_(clip)
        for name in expected:
            assert_same({name: actual[name]}, {name: expected[name]}, RTOL, what)

    train_both(reference, ours.module, backward, partial(full_tensors, ours), steps, what)
