"""Test that ranks share a dropout mask if they compute the same numbers, and else draw different masks."""

from itertools import combinations
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.models.blocks import recompute_blocks
from lab.ranks import run_ranks
from tensor_parallel.parallelize import TensorParallel, parallelize
from tests.on_ranks import on_ranks
from tests.tensor_parallel.equivalence import gathered, gpt, text
from training.data import seed_step


def model_of(cluster: Cluster, sequence_parallel: bool, dropout: float = 0.5) -> TensorParallel:
    """Make a model after each rank has drawn other numbers: only rank 0's seed must count."""
    torch.manual_seed(7 + cluster.rank)
    torch.rand(cluster.rank)
    return parallelize(gpt(dropout=dropout, num_layers=1), None, sequence_parallel)


def masks_of_a_step(model: TensorParallel) -> dict[str, Tensor]:
    """Return the masks of one training forward: three of the residual stream, one of the attention."""
    kept: dict[str, list[Tensor]] = {"residual": [], "attention": []}
    attend = F.scaled_dot_product_attention

    def look(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert inputs[0].ne(0).all()
        kept["residual"].append(output != 0)

    def weights_first(q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor, **options) -> Tensor:
        """Call torch's attention with an identity matrix as values, so that its output is the weights."""
        time = q_bhte.shape[2]
        positions = torch.eye(time, dtype=q_bhte.dtype).expand(*k_bhte.shape[:2], time, time)
        weights_bhtt = attend(q_bhte, k_bhte, positions, **options)
        kept["attention"].append(weights_bhtt[..., *torch.tril_indices(time, time)] != 0)
        return weights_bhtt @ v_bhte

    dropouts = [model.module.dropout, model.module.blocks[0].dropout]
    hooks = [dropout.register_forward_hook(look) for dropout in dropouts]
    with mock.patch.object(F, "scaled_dot_product_attention", weights_first):
        model(text()[0])
    for hook in hooks:
        hook.remove()
    assert len(kept["residual"]) == 3 and len(kept["attention"]) == 1
    return {name: torch.stack(masks) for name, masks in kept.items()}


def are_independent(a: Tensor, b: Tensor) -> bool:
    """Tell whether half of the entries are equal."""
    return 0.4 < (a == b).double().mean().item() < 0.6


def test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one():
    def look(cluster: Cluster) -> list[dict[str, Tensor]]:
        model = model_of(cluster, False)
        return [masks_of_a_step(model) for _ in range(2)]

    found = run_ranks(look, 2)
    for mine, others in zip(*found, strict=True):
        assert torch.equal(mine["residual"], others["residual"])
        assert are_independent(mine["attention"], others["attention"])
    for before, after in found:
        assert all(are_independent(before[where], after[where]) for where in before), "in another step"
        assert are_independent(after["attention"][0, :, 0], after["attention"][0, :, 1]), "of another head"


def test_with_sequence_parallel_the_tokens_of_different_ranks_have_different_masks():
    found = run_ranks(lambda cluster: masks_of_a_step(model_of(cluster, True)), 3)
    assert found[0]["residual"].shape == (3, 4, 4, 24)
    for first, second in combinations(found, 2):
        assert all(are_independent(first[where], second[where]) for where in first)


@on_ranks(2)
def test_blocks_computed_again_in_the_backward_draw_the_same_masks(cluster: Cluster):
    def trained(cluster: Cluster, sequence_parallel: bool, recompute: bool) -> dict[str, Tensor | None]:
        model = model_of(cluster, sequence_parallel)
        if recompute:
            recompute_blocks(model)
        x, y = text(11)
        model.loss(model(x), y).backward()
        return gradients(model.module)

    for by_tokens in (False, True):
        assert_same(trained(cluster, by_tokens, True), trained(cluster, by_tokens, False))


@on_ranks(2)
def test_a_step_draws_the_same_masks_whatever_was_drawn_before_and_evaluation_draws_none(cluster: Cluster):
    for sequence_parallel in (False, True):
        model = model_of(cluster, sequence_parallel)
        found = []
        for _ in range(2):  # as where a run resumes
            seed_step(seed=3, step=5, stream=0)
            found.append(masks_of_a_step(model))
            masks_of_a_step(model)
        assert all(torch.equal(found[0][where], found[1][where]) for where in found[0])

        x, _ = text(11)
        for dropout, training in ((0.5, False), (0.0, True)):
            model = model_of(cluster, sequence_parallel, dropout).train(training)
            before = torch.get_rng_state()
            y = gathered(model(x), -1)[..., :61]
            assert_same({"logits": y}, {"logits": gpt(num_layers=1)(x).detach()})
            assert torch.equal(torch.get_rng_state(), before)
