"""Several backwards without zero_grad() in between add up, as those of one process do, in float64."""

from dataclasses import replace

import pytest
import torch

from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from lab.check import assert_same
from lab.cluster import Cluster
from lab.model import loss_of
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import RTOL, Tensors, batch, gpt, gradients_of


def of_one_process(rows: int, times: int) -> Tensors:
    """Return the sum of the gradients of `times` backwards, each of its part of the rows."""
    model, (x, y) = gpt(), batch(rows)
    for part, targets in zip(x.chunk(times), y.chunk(times), strict=True):
        loss_of(model(part), targets).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def compare(cluster: Cluster, sizes: Sizes, times: int = 2) -> None:
    """Accumulate over `times` backwards, twice, and compare each gradient with one process."""
    mesh = Mesh(cluster, sizes)
    rows = 2 * sizes.data * sizes.microbatches * times
    x, y = batch(rows)
    own = [
        [part.chunk(sizes.data)[mesh.coordinate("data")] for part in both]
        for both in zip(x.chunk(times), y.chunk(times), strict=True)
    ]
    hybrid = HybridParallel(gpt(), mesh, own[0][0][:2], torch.optim.SGD, lr=0.0)
    alone = of_one_process(rows, times)
    expected = {name: alone[name] for name in hybrid.named_parameters()}
    for step in range(2):
        hybrid.optimizer.zero_grad()
        for part, targets in own:
            hybrid.backward(part, targets)
        what = f"gradient of step {step}, zero {sizes.zero}, {sizes},"
        assert_same(gradients_of(hybrid), expected, RTOL, what)
        hybrid.clip_grad_norm_(0.5)
        hybrid.optimizer.step()


def check(*every: Sizes) -> None:
    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes)

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
