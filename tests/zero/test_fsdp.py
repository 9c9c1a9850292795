"""Test PyTorch's fully_shard as train_fsdp.py uses it. Its gradients are DTensors, so the loop is its own."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same, gradients, parameters, reference_gradients
from lab.cluster import Cluster
from lab.models.model import BabyCNN
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry
from tests.data_parallel.equivalence import BATCH, Loss, gpt, mine, text, text_loss
from tests.dtensors import full_tensors
from zero.train_fsdp import Args, shard, traffic_per_step


def accumulate(model: nn.Module, loss: Loss, batch: list[Tensor], microbatches: int = 1) -> None:
    """Compute the gradients of a step, as the lesson does."""
    parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
    for i, (x, y) in enumerate(parts):
        model.set_requires_gradient_sync(i == len(parts) - 1)
        (loss(model, x, y) / microbatches).backward()


def digits() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, 1, 8, 8, generator=random).double(), torch.randint(
        10, (BATCH,), generator=random
    )


def frozen_gpt(seed: int) -> nn.Module:
    model = gpt(seed)
    model.position_embedding.requires_grad_(False)
    model.blocks[0].attention.q_proj.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Any, Loss, tuple[Tensor, Tensor]]] = {
    "untied": (functools.partial(gpt, tied=False), text_loss, text()),
    "frozen": (frozen_gpt, text_loss, text()),  # has tied weights, too
    "images": (lambda seed: BabyCNN(seed=seed).double(), text_loss, digits()),
}


@pytest.mark.parametrize(
    ("world_size", "models"), [(1, ["images"]), (2, ["untied"]), (3, ["frozen"]), (4, ["images"])]
)
def test_gradients_and_parameters_equal_one_process(world_size: int, models: list[str]):
    def work(cluster: Cluster) -> None:
        for what in models:
            make, loss, batch = MODELS[what]
            reference, model = make(0), shard(make(cluster.rank), cluster.device)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
            for microbatches in (1, 3):
                expected = reference_gradients(reference, lambda m: loss(m, *batch))
                optimizers[1].zero_grad()
                accumulate(model, loss, mine(cluster, batch), microbatches)
                assert_same(full_tensors(gradients(model)), expected, what=f"gradient of {what}")
                for optimizer in optimizers:
                    optimizer.step()
            assert_same(full_tensors(parameters(model)), parameters(reference), what=f"parameter of {what}")
            restored = make(7)
            restored.load_state_dict(model.full_state_dict())
            assert_same(
                parameters(restored), full_tensors(parameters(model)), rtol=0, what=f"saved, of {what},"
            )

    run_ranks(work, world_size)


def without_noise(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Leave out what should be 0: rounding is all that is left of the gradient of a key's bias."""
    return {name: g for name, g in gradients.items() if not name.endswith("k_proj.bias")}


def test_with_every_option_gradients_are_the_same_and_all_messages_are_comms_and_as_many_as_by_formula():
    ways: list[dict[str, Any]] = [
        {},
        {"grad_acc_steps": 3},
        {"reshard_after_forward": False, "grad_acc_steps": 2},
        {"bf16": True},
    ]

    def work(cluster: Cluster) -> None:
        expected = reference_gradients(frozen_gpt(0).float(), lambda m: text_loss(m, *text()))
        for way in ways:
            args = Args(**way)
            options = args.bf16, args.reshard_after_forward
            model = shard(frozen_gpt(cluster.rank).float(), cluster.device, *options)
            LEDGER.clear()
            accumulate(model, text_loss, mine(cluster, text()), args.grad_acc_steps)
            assert LEDGER.total() == traffic_per_step(cluster, args, model), way
            used = {Entry(op, "torch", by_formula=True) for op in ("all_gather", "reduce_scatter")}
            assert used <= LEDGER.rows().keys(), way
            found = without_noise(full_tensors(gradients(model)))
            rtol = 2**-3 if args.bf16 else 1e-4
            assert_same(found, without_noise(expected), rtol, f"gradient with {way}")
            assert {p.dtype for p in model.parameters()} == {torch.float32} == {model(text()[0]).dtype}

    run_ranks(work, 3)
