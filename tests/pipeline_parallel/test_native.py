"""PyTorch's schedules train our stages as one process does."""

from collections.abc import Callable

import pytest
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import forked, run_ranks
from pipeline_parallel.actions import placement
from pipeline_parallel.schedules import table_of
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_torch_pipelining import TorchPipeline
from tests.pipeline_parallel.equivalence import (
    RTOL,
    Batch,
    cnn,
    gpt,
    gradients_of,
    images,
    only,
    own_gradients,
    text,
)

forked.preload("pipeline_parallel.train_torch_pipelining")

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")


def compare_with_one_process(
    cluster: Cluster, name: str, make: Callable[[], nn.Module], batch: Batch, microbatches: int
) -> None:
    (x, y), reference = batch, make()
    what = f"{name}, {type(reference).__name__} on {cluster.world_size} ranks"
    rank_of = placement(table_of(name, cluster.world_size, microbatches))
    stages = balanced_stages(make(), len(rank_of))
    pipeline = TorchPipeline(stages, name, microbatches, x[: len(x) // microbatches], rank_of)
    expected = loss_of(reference(x), y)
    expected.backward()
    loss = pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    is_last = rank_of[pipeline.last] == cluster.rank
    assert_same({"loss": loss}, {"loss": expected.detach() if is_last else None}, RTOL, f"loss, {what},")
    mine = own_gradients(pipeline)
    assert_same(mine, only(gradients_of(reference), mine), RTOL, f"gradient, {what},")


def test_every_gradient_is_that_of_one_process():
    def compare(cluster: Cluster) -> None:
        for name in SCHEDULES:
            compare_with_one_process(cluster, name, lambda: gpt(num_layers=2), text(4), 4)
            compare_with_one_process(cluster, name, cnn, images(8), 4)

    run_ranks(compare, 2)


def test_what_is_not_for_pytorchs_schedules_is_refused_in_one_sentence():
    def refuse(cluster: Cluster) -> None:
        for name, microbatches, sentence in (
            ("1f1b", 2, r"PyTorch's 1f1b refuses: Number of microbatches \(2\) must be greater"),
            ("interleaved", 7, "of the number of rounds"),
            ("dualpipe_v", 5, "at least as many microbatches as stages"),
        ):
            (x, _), rank_of = text(microbatches), placement(table_of(name, 3, microbatches))
            stages = balanced_stages(gpt(num_layers=6), len(rank_of))
            with pytest.raises(WorkbookError, match=sentence) as refusal:
                TorchPipeline(stages, name, microbatches, x[:1], rank_of)
            assert "\n" not in str(refusal.value)

    run_ranks(refuse, 3)
