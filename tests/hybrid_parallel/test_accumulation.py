"""Several backwards without zero_grad() in between add up, as those of one process do, in float64."""

from dataclasses import replace

import pytest
import torch

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import RTOL, Tensors, batch, gpt, gradients_of, those_of
from tests.hybrid_parallel.plain_experts import auxiliary_loss, with_plain_experts


def of_one_process(model: GPT, rows: int, times: int, aux_weight: float) -> Tensors:
    """Return the sum of the gradients of `times` backwards, each of its part of the rows."""
    x, y = batch(rows)
    for part, targets in zip(x.chunk(times), y.chunk(times), strict=True):
        (loss_of(model(part), targets) + aux_weight * auxiliary_loss(model)).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def compare(cluster: Cluster, sizes: Sizes, experts: Experts | None = None, times: int = 2) -> None:
    """Accumulate over `times` backwards, twice, and compare each gradient with one process.

    Experts need sizes with one microbatch, because each microbatch has an auxiliary loss of its own.
    """
    mesh = Mesh(cluster, sizes)
    rows = 2 * sizes.data * sizes.microbatches * times
    x, y = batch(rows)
    own = [
        [part.chunk(sizes.data)[mesh.coordinate("data")] for part in both]
        for both in zip(x.chunk(times), y.chunk(times), strict=True)
    ]
    hybrid = HybridParallel(gpt(), mesh, own[0][0][:2], torch.optim.SGD, experts, lr=0.0)
    model = gpt()
    if experts is not None:
        model = with_plain_experts(model, experts.moe, sizes.replicas)
        model.load_state_dict(hybrid.full_state_dict())
    alone = of_one_process(model, rows, times, experts.aux_weight if experts is not None else 0.0)
    expected = those_of(hybrid, alone)
    for step in range(2):
        hybrid.optimizer.zero_grad()
        for part, targets in own:
            hybrid.backward(part, targets)
        what = f"gradient of step {step}, zero {sizes.zero}, {sizes},"
        assert_same(gradients_of(hybrid), expected, RTOL, what)
        hybrid.clip_grad_norm_(0.5)
        hybrid.optimizer.step()


def check(*every: Sizes, experts: Experts | None = None) -> None:
    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes, experts)

    run_ranks(work, 4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backwards_beside_each_stage_of_zero_add_up(sequence_parallel: bool):
    sizes = Sizes(data=2, tensor=2, sequence_parallel=sequence_parallel)
    check(*(replace(sizes, zero=zero, microbatches=m) for zero, m in ((0, 2), (1, 1), (2, 2), (3, 2))))


def test_backwards_of_a_pipeline_add_up():
    check(
        Sizes(pipeline=2, data=2, microbatches=2),
        Sizes(pipeline=2, data=2, microbatches=2, zero=1),
        Sizes(pipeline=2, tensor=2, microbatches=2, sequence_parallel=True),
    )


def test_backwards_of_cut_sequences_add_up():
    check(
        Sizes(data=2, context=2, microbatches=2),
        Sizes(data=2, context=2, zero=2, attention="all_to_all", microbatches=2),
        Sizes(context=2, tensor=2, sequence_parallel=True, zero=3),
        Sizes(pipeline=2, context=2, microbatches=2),
    )


def test_backwards_of_divided_experts_add_up():
    check(
        Sizes(data=4, expert_ranks=2),
        Sizes(data=2, context=2, expert_ranks=4),
        Sizes(data=2, tensor=2, expert_ranks=2),
        Sizes(data=4, zero=2),
        experts=Experts(MoEConfig(4, 2), aux_weight=0.3, seed=7),
    )
