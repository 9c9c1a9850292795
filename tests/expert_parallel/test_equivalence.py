"""Test that experts on several ranks have the gradients of one process that computes token by token."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from expert_parallel.balancing import move_bias
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.train_moe import ExpertParallel, Router
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.expert_parallel.equivalence import compare_with_one_process
from tests.expert_parallel.reference import gpt, text
from tests.on_ranks import on_ranks

# The number of ranks, and the options of each comparison.
CASES: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "two ranks": (2, [{"moe": MoEConfig(4, 1)}, {"moe": MoEConfig(4, 2)}]),
    "replicas of some experts": (4, [{"moe": MoEConfig(4, 2), "expert_ranks": 2}]),
    # This is plain data parallelism.
    "replicas of all experts": (2, [{"moe": MoEConfig(4, 2), "expert_ranks": 1, "balance": "aux"}]),
    # A token that no expert takes leaves the block with its residual.
    "a capacity": (2, [{"moe": MoEConfig(4, 1, 0.5)}, {"moe": MoEConfig(4, 2, 1.0)}]),
    "an auxiliary loss of all ranks": (2, [{"moe": MoEConfig(4, 1), "balance": "aux"}]),
    "a bias by the counts of all ranks": (2, [{"moe": MoEConfig(4, 2), "balance": "bias", "steps": 4}]),
    "no token for a rank": (4, [{"moe": MoEConfig(8, 2), "without_tokens": (4, 5)}]),  # the experts of rank 2
    "all options": (
        4,
        [
            {"moe": MoEConfig(8, 2, 1.0, True), "expert_ranks": 2, "balance": "bias", "tied": False},
            {
                **{"moe": MoEConfig(8, 2, 1.0, True), "expert_ranks": 2, "balance": "aux", "steps": 1},
                "frozen": ("router", "shared"),
            },
        ],
    ),
    # An expert on one rank only, and all that is before the layer, so that its input is a constant.
    "frozen parameters": (
        2,
        [
            {"moe": MoEConfig(2, 2), "frozen": frozen, "tied": False}
            for frozen in (("experts.1.",), ("embedding", "norm", "attention", "router", "experts.0."))
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_train_as_one_process_with(case: str):
    n, comparisons = CASES[case]

    def work(cluster: Cluster) -> None:
        for options in comparisons:
            compare_with_one_process(cluster, **options)

    run_ranks(work, n, timeout=30)


def test_the_rank_of_an_expert_changes_neither_its_weights_nor_its_gradients():
    def work(cluster: Cluster) -> str:
        moe = MoEConfig(6, 2, capacity=1.0, shared=True)
        return compare_with_one_process(cluster, moe, balance="aux", steps=1)

    assert len({digest for n in (1, 2, 3) for digest in run_ranks(work, n)}) == 1


@on_ranks(2)
def test_only_tokens_for_other_ranks_are_sent(cluster: Cluster):
    """The forward sends what leaves and returns what has come, the backward the same; d is the width."""
    model, d, itemsize = ExpertParallel(gpt(), MoEConfig(4, 1), form_groups(2)), 8, 8
    x, y = (part[6 * cluster.rank :][:6] for part in text())
    LEDGER.clear()
    loss_of(model(x), y).backward()
    model.finish_gradient_sync()
    sent = {entry.op: t.bytes_sent for entry, t in LEDGER.rows().items() if entry.pattern != "header"}
    sent_rE = sum(layer.sent_rE for layer in model.layers)
    tokens = int(sent_rE[0, 2:].sum() + sent_rE[1, :2].sum())
    assert sent["all_to_all"] == 2 * tokens * d * itemsize
    assert sent["all_gather"] == len(model.layers) * 4 * 8  # a count of 8 bytes for each expert
    assert sent["all_reduce"] == sum(parameter.numel() for parameter in model.dense) * itemsize


def moved_biases(cluster: Cluster, parts: int, how: str = "") -> list[list[float]]:
    """Return how many choices count in a step of so many microbatches, and how far each bias moves."""
    x, y = text()
    model = ExpertParallel(gpt(0), MoEConfig(4, 1), form_groups(cluster.world_size))
    if how:
        for block in model.module.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=how == "reentrant")
    for part, targets in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        loss_of(model(part), targets).backward()
        with torch.no_grad():
            model.eval()(x[:1])
            model.train()
    model.finish_gradient_sync()
    counts = [layer.counts_rE.sum().item() for layer in model.layers]
    model.move_biases(1.0)
    return [counts, *(layer.router.bias_E.tolist() for layer in model.layers)]


@on_ranks(2)
def test_a_bias_moves_by_the_choices_of_all_microbatches_of_a_step(cluster: Cluster):
    expected = moved_biases(cluster, 1)
    assert any(any(biases) for biases in expected[1:])
    assert moved_biases(cluster, 3) == expected


def test_a_bias_moves_also_where_the_model_has_16_bits():
    router = Router(8, 2, 1).to(torch.bfloat16)
    router.bias_E += 0.5  # half a unit in the last place of bfloat16 is 0.001 here
    move_bias(router.bias_E, torch.tensor([[1, 3]]), rate=0.0005)
    assert_same({"bias": router.bias_E}, {"bias": torch.tensor([0.5005, 0.4995])}, 1e-6)
    assert router.weight.dtype == torch.bfloat16 and router.double().bias_E.dtype == torch.float64


@on_ranks(2)
def test_choices_that_are_computed_again_for_the_backward_count_once(cluster: Cluster):
    for how in ("reentrant", "not reentrant"):
        model_biases, expected = moved_biases(cluster, 2, how), moved_biases(cluster, 2)
        assert model_biases == expected, how


@on_ranks(2)
def test_an_auxiliary_loss_without_a_gradient_is_refused(cluster: Cluster):
    model = ExpertParallel(gpt(0), MoEConfig(4, 1), form_groups(cluster.world_size))
    for block in model.module.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    model(text()[0])
    with pytest.raises(WorkbookError, match="use_reentrant=False"):
        model.auxiliary_loss()


@on_ranks(2)
def test_inference_mode_computes_what_no_grad_does(cluster: Cluster):
    model = ExpertParallel(gpt(0), MoEConfig(4, 2), form_groups(cluster.world_size)).eval()
    with torch.no_grad():
        expected = model(text()[0])
    with torch.inference_mode():
        assert torch.equal(model(text()[0]), expected)
