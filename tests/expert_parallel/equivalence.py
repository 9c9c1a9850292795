"""Compare the full gradients and parameters of an expert parallel GPT with one process, by name."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.full_state import full_state
from expert_parallel.train_moe import ExpertParallel
from lab.check import assert_same, module_digest
from lab.cluster import Cluster
from lab.models.model import IGNORED, loss_of
from tests.expert_parallel.reference import gpt, naive_gpt, text
from training.valid_targets import valid_targets

AUX_WEIGHT, BIAS_RATE = 0.5, 0.02


def gradients_or_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name: zeros where nothing has flowed, as in an expert without tokens."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def compare_with_one_process(
    cluster: Cluster,
    moe: MoEConfig,
    expert_ranks: int | None = None,
    balance: str = "none",
    steps: int = 2,
    frozen: Sequence[str] = (),
    without_tokens: Sequence[int] = (),
    ignored: int = 0,
    **changes: Any,
) -> str:
    """Compare the gradients in each step of SGD, what the routers decide, and the parameters and biases.

    `frozen` lists parts of the names of frozen parameters. No router chooses the experts `without_tokens`.
    The targets of the first `ignored` examples do not count. Return the digest of the initial parameters.
    """
    n = cluster.world_size
    what = f"{moe}, {expert_ranks} expert ranks, balance {balance}, {frozen}, {changes}, {n} ranks"
    groups = form_groups(n if expert_ranks is None else expert_ranks)
    ours = ExpertParallel(gpt(cluster.rank, **changes), moe, groups, seed=5)
    reference = naive_gpt(moe, n, **changes)
    plain = {name: tensor for name, tensor in gpt(0, **changes).state_dict().items() if "mlp." not in name}
    initial = full_state(ours.module.state_dict(), groups)
    assert_same({name: initial[name] for name in plain}, plain, 0, f"initial parameter, {what},")
    reference.load_state_dict(initial)
    digest = module_digest(reference)
    mixtures = [block.mlp for block in reference.blocks]
    for layer in [*ours.layers, *mixtures]:
        layer.router.bias_E[list(without_tokens)] = -10.0
    for model in (reference, ours.module):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    x, y = text()
    y = y.masked_fill(torch.arange(len(y))[:, None] < ignored, IGNORED)
    mine = slice(cluster.rank * len(x) // n, (cluster.rank + 1) * len(x) // n)

    def backward(step: int) -> None:
        expected_loss = loss_of(reference(x), y)
        loss = loss_of(ours(x[mine]), y[mine], valid_targets(y[mine]))
        if balance == "aux":
            expected_loss = expected_loss + AUX_WEIGHT * sum(layer.auxiliary_loss() for layer in mixtures)
            loss = loss + AUX_WEIGHT * ours.auxiliary_loss()
        expected_loss.backward()
        loss.backward()
        ours.finish_gradient_sync()
        assert all((p.grad is not None) == p.requires_grad for p in ours.parameters())
        for layer, mixture in zip(ours.layers, mixtures, strict=True):
            assert layer.chosen_rE.sum(0).tolist() == mixture.counts
            assert int((layer.chosen_rE - layer.sent_rE).sum()) == mixture.dropped
            assert (mixture.dropped > 0) == (moe.capacity is not None), "the test must drop tokens"
            assert not any(mixture.counts[e] for e in without_tokens)
        if balance == "bias":
            ours.move_biases(BIAS_RATE)
            for mixture in mixtures:
                mixture.move_bias(BIAS_RATE)

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (reference, ours.module)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(step)
        found, expected = full_state(gradients_or_zeros(ours.module), groups), gradients_or_zeros(reference)
        assert_same(found, expected, what=f"gradient, {what}, step {step},")
        for optimizer in optimizers:
            optimizer.step()
    final = full_state(ours.module.state_dict(), groups)
    assert_same(final, dict(reference.state_dict()), what=f"parameter or bias, {what},")
    return digest
