"""Clipping on a mesh counts each number once, and works on ranks that have nothing to add up."""

import torch
from torch import nn

from expert_parallel.config import MoEConfig
from hybrid_parallel.clipping import clip_over
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import (
    RTOL,
    batch,
    gpt,
    gradients_of,
    of_one_process,
    those_of,
    with_experts,
)

LAYERS = {"num_layers": 2}


def test_the_norm_of_a_rank_without_gradients_is_that_of_all():
    def work(cluster: Cluster) -> tuple[float, bool]:
        parameter = nn.Parameter(torch.zeros(2))
        gradient = torch.tensor([3.0, 4.0]) if cluster.rank == 0 else None
        norm = clip_over((None,), [(parameter, gradient)], set(), 1.0, None)
        return norm.item(), norm.dtype == torch.float64

    assert run_ranks(work, 2) == [(5.0, True), (5.0, True)]


def compare(cluster: Cluster, sizes: Sizes, experts: Experts | None) -> None:
    """Compare the norm and the clipped gradients of a backward with those of one process."""
    rows, what = 2 * sizes.data * sizes.microbatches, f"{sizes}, zero {sizes.zero}"
    mesh = Mesh(cluster, sizes)
    x, y = (part.chunk(sizes.data)[mesh.coordinate("data")] for part in batch(rows))
    example = x[: len(x) // sizes.microbatches]
    hybrid = HybridParallel(gpt(**LAYERS), mesh, example, torch.optim.SGD, experts, lr=0.1)
    if experts is None:
        step = of_one_process(rows, tuple(LAYERS.items()))[0]
    else:
        step = next(with_experts(hybrid, experts, rows, LAYERS))

    hybrid.backward(x, y)
    limit = step.norm.item() / 2
    norm = hybrid.clip_grad_norm_(limit)
    assert_same({"norm": norm}, {"norm": step.norm}, RTOL, f"norm of all gradients, {what},")
    scale = limit / (step.norm + 1e-6)
    expected = {name: gradient * scale for name, gradient in step.gradients.items()}
    assert_same(gradients_of(hybrid), those_of(hybrid, expected), RTOL, f"clipped gradient, {what},")


def check(*every: Sizes, experts: Experts | None = None) -> None:
    """Compare each with one process; all have 4 ranks."""

    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes, experts)

    run_ranks(work, 4)


def test_ranks_with_other_tokens_of_the_same_examples_count_a_gradient_once():
    check(
        Sizes(data=2, context=2),
        Sizes(data=2, context=2, zero=1, microbatches=2),
        Sizes(context=2, tensor=2, sequence_parallel=True, zero=3),
        Sizes(pipeline=2, context=2, microbatches=2),
    )


def test_divided_experts_count_once_and_so_does_everything_else():
    check(
        Sizes(data=4, expert_ranks=2),
        Sizes(data=2, context=2, expert_ranks=4),
        Sizes(data=2, tensor=2, expert_ranks=2),
        Sizes(pipeline=2, data=2, expert_ranks=2, microbatches=2),
        experts=Experts(MoEConfig(4, 2), aux_weight=0.3, seed=7),
    )
