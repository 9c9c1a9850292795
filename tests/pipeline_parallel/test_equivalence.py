"""Every schedule has the loss, the gradients and the traffic that it must have, whatever the model is."""

from functools import partial

import pytest
import torch
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b, stages_per_rank
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    BY_HAND,
    RTOL,
    cnn,
    compare_schedule,
    compare_with_one_process,
    gpt,
    images,
    mlp,
    own_gradients,
    text,
    vectors,
)


def tied_sequential() -> nn.Module:
    """Make a language model of plain modules whose embedding is its last layer's weight, too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        *(nn.LayerNorm(8), nn.Linear(8, 13, bias=False)),
    )
    model[7].weight = model[0].weight
    return model.double()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process(n: int):
    """On two ranks also other models, and fewer or many more microbatches than ranks; on three recomputed."""

    def compare(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = n * stages_per_rank(name, chunks)
            of_layers = partial(gpt, num_layers=max(2, stages - 2), tied=n != 3)
            steps = 2 if n == 2 else 1
            compare_schedule(cluster, name, n + 1, of_layers, text, chunks, steps=steps, recompute=n == 3)
            if n == 2:
                for microbatches in (1, 5):
                    compare_schedule(cluster, name, microbatches, partial(mlp, stages), vectors, chunks)
                if stages <= 4:
                    compare_schedule(cluster, name, 2, cnn, images, chunks, steps=1)
                    compare_schedule(cluster, name, 2, tied_sequential, text, chunks, steps=1)

    run_ranks(compare, n, timeout=120)


def transposed() -> nn.Module:
    """Make a CNN that keeps channels last in memory: what its stages send is not contiguous."""
    return cnn().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_steps_by_hand_have_the_gradients_and_messages_of_their_tables(n: int):
    def compare(cluster: Cluster) -> None:
        for name, lesson in BY_HAND.items():
            compare_schedule(cluster, name, 5, partial(mlp, n + 1), vectors, by_hand=lesson)
            if n == 3:
                recomputed = {"by_hand": lesson, "recompute": True}
                compare_schedule(cluster, name, 3, partial(gpt, num_layers=2), text, **recomputed)
                compare_schedule(cluster, name, 2, transposed, images, by_hand=lesson, steps=1)

    run_ranks(compare, n)


def test_however_the_model_is_cut_it_is_trained_the_same():
    def compare(cluster: Cluster) -> None:
        table = one_f_one_b(3, 2)
        for balance in ("layers", "parameters"):
            compare_with_one_process(cluster, partial(gpt, num_layers=4), table, text(4), balance=balance)

    run_ranks(compare, 3)


def test_gradients_of_several_steps_add_up_until_they_are_cleared():
    def compare(cluster: Cluster) -> None:
        x, y = text(4)
        pipeline = Pipeline(gpt(num_layers=2), one_f_one_b(2, 2), loss_of, x[:2])
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        once = own_gradients(pipeline)
        pipeline.zero_grad()
        for _ in range(2):
            pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        assert_same(own_gradients(pipeline), {name: 2 * each for name, each in once.items()}, RTOL)

    run_ranks(compare, 2)
