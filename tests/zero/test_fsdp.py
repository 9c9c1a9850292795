"""Test PyTorch's fully_shard as train_fsdp.py uses it."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same, gradients, reference_gradients
from lab.cluster import Cluster
from lab.models.model import BabyCNN
from lab.trace.ledger import LEDGER, Entry
from tests.dtensors import full_tensors
from tests.equivalence import Trained, compare_with_one_process, mine
from tests.on_ranks import on_ranks
from tests.tasks import BATCH, Task, gpt, text, text_loss
from tests.wrappers import named
from zero.train_fsdp import Args, traffic_per_step


def images(_: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, 1, 8, 8, generator=random).double()
    return x, torch.randint(10, (BATCH,), generator=random)


def frozen_gpt(seed: int) -> nn.Module:
    model = gpt(seed)
    model.position_embedding.requires_grad_(False)
    model.blocks[0].attention.q_proj.requires_grad_(False)
    return model


IMAGES = Task(lambda seed: BabyCNN(seed=seed).double(), text_loss, images)
UNTIED = Task(functools.partial(gpt, tied=False), text_loss, text)
FROZEN = Task(frozen_gpt, text_loss, text)  # has tied weights, too


@pytest.mark.parametrize(("n", "task"), [(1, IMAGES), (2, UNTIED), (3, FROZEN), (4, IMAGES)])
@on_ranks("n")
def test_gradients_and_parameters_equal_one_process(cluster: Cluster, n: int, task: Task):
    compare_with_one_process(cluster, named("fsdp"), task, (1, 3))


def without_noise(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Leave out what should be 0: rounding is all that is left of the gradient of a key's bias."""
    return {name: g for name, g in gradients.items() if not name.endswith("k_proj.bias")}


@on_ranks(3)
def test_with_every_option_gradients_are_the_same_and_all_messages_are_comms_and_as_many_as_by_formula(
    cluster: Cluster,
):
    ways: list[dict[str, Any]] = [
        {},
        {"grad_acc_steps": 3},
        {"reshard_after_forward": False, "grad_acc_steps": 2},
        {"bf16": True},
    ]
    expected = reference_gradients(frozen_gpt(0).float(), lambda m: text_loss(m, *text()))
    for way in ways:
        args = Args(**way)
        options = {"bf16": args.bf16, "reshard_after_forward": args.reshard_after_forward}
        ours = Trained(named("fsdp"), frozen_gpt(cluster.rank).float(), **options)
        model = ours.model
        LEDGER.clear()
        ours.accumulate(text_loss, mine(cluster, text()), args.grad_acc_steps)
        assert LEDGER.total() == traffic_per_step(cluster, args, model), way
        used = {Entry(op, "torch", by_formula=True) for op in ("all_gather", "reduce_scatter")}
        assert used <= LEDGER.rows().keys(), way
        found = without_noise(full_tensors(gradients(model)))
        rtol = 2**-3 if args.bf16 else 1e-4
        assert_same(found, without_noise(expected), rtol, f"gradient with {way}")
        assert {p.dtype for p in model.parameters()} == {torch.float32} == {model(text()[0]).dtype}
