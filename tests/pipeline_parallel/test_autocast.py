"""A step under torch.autocast has the gradients of one process under torch.autocast."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    Batch,
    cnn,
    gpt,
    gradients_of,
    images,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)

MICROBATCHES = 3


def single(make: Callable[[], nn.Module]) -> nn.Module:
    return make().float()


def of_one_process(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients of the same microbatches: bfloat16 rounds sums over a larger batch otherwise."""
    model = single(make)
    for part, targets in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(part), targets) / MICROBATCHES
        loss.backward()
    return gradients_of(model)


def compare(cluster: Cluster, name: str, make: Callable[[], nn.Module], batch: Batch, **options) -> None:
    x, y = (tensor.float() if tensor.is_floating_point() else tensor for tensor in batch)
    expected = of_one_process(make, x, y)
    pipeline = Pipeline(
        single(make), table_of(name, 2, MICROBATCHES, 2), loss_of, x[: len(x) // MICROBATCHES], **options
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    own = own_gradients(pipeline)
    # The order in which backwards and float32 sums of microbatches come is all that differs.
    assert_same(
        own, only(expected, own), 1e-5, f"gradient, {name}, {options}, {type(single(make)).__name__},"
    )


def test_every_schedule_has_the_gradients_of_one_process_under_autocast():
    def work(cluster: Cluster) -> None:
        for name in dict.fromkeys(name for name, _ in ALL_SCHEDULES):
            for make, batch in (
                (partial(mlp, 4), vectors(6)),
                (cnn, images(6)),
                (partial(gpt, num_layers=4), text(6)),
            ):
                compare(cluster, name, make, batch)
        compare(cluster, "zb_v", partial(gpt, num_layers=4), text(6), recompute=True)

    run_ranks(work, 2)
