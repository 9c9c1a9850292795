"""The lessons' techniques by hand, each in one straight line: a toy model, its ranks, and one process."""

import torch
from torch import nn

from lab.cluster import Cluster
from lab.ranks import run_ranks
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel


def test_model_parallel_equals_one_process():
    # Three layers, for three ranks, and a batch of four examples. The same seed makes them equal everywhere.
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 7)), nn.Linear(7, 3)]
    layers = [layer.double() for layer in layers]
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 2, 1, 1])

    # What one process does: all layers forward, all layers backward.
    expected_loss = nn.functional.cross_entropy(layers[2](layers[1](layers[0](x))), y)
    expected_loss.backward()
    expected = [[parameter.grad.clone() for parameter in layer.parameters()] for layer in layers]

    def work(cluster: Cluster) -> None:
        # Each rank takes one layer as its stage, and knows what comes in and what goes out: the shape of a
        # microbatch's activation. The batch travels in two microbatches of two examples.
        stage = layers[cluster.rank]
        stage.zero_grad()
        boundaries = [None, torch.empty(2, 6).double(), torch.empty(2, 7).double(), None]
        lesson = ModelParallel(
            stage=stage,
            loss_of=nn.functional.cross_entropy,
            microbatches=2,
            rank=cluster.rank,
            ranks=cluster.world_size,
            x_like=boundaries[cluster.rank],
            y_like=boundaries[cluster.rank + 1],
        )
        # The first rank uses x, the last one y. Activations go down the ranks, gradients come back.
        loss = lesson.step(x, y)

        # Only the last rank knows the loss, and every rank has the gradients of its own stage.
        if cluster.rank == 2:
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-9, atol=0)
        else:
            assert loss is None
        for parameter, gradient in zip(stage.parameters(), expected[cluster.rank], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-15)

    run_ranks(work, 3)


def test_gpipe_by_hand_equals_one_process():
    # Four small stages, for four ranks, and a batch of twelve examples.
    torch.manual_seed(0)
    stages = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Linear(6, 3)]
    stages = [stage.double() for stage in stages]
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3

    # One process takes the batch in one piece.
    expected_loss = nn.functional.cross_entropy(nn.Sequential(*stages)(x), y)
    expected_loss.backward()
    expected = [[parameter.grad.clone() for parameter in stage.parameters()] for stage in stages]

    def work(cluster: Cluster) -> None:
        # The pipeline takes it in six microbatches of two, all forward and then all backward. While rank 3 is
        # at the first one, ranks 2, 1 and 0 are at the second, third and fourth.
        stage = stages[cluster.rank]
        stage.zero_grad()
        boundaries = [None, *(torch.empty(2, width).double() for width in (5, 5, 6)), None]
        order = []

        class Noted:
            """Notes the order of the actions, as a timeline would."""

            def __init__(self, name: str) -> None:
                order.append(name)

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

        lesson = AllForwardAllBackward(
            stage=stage,
            loss_of=nn.functional.cross_entropy,
            microbatches=6,
            rank=cluster.rank,
            ranks=cluster.world_size,
            x_like=boundaries[cluster.rank],
            y_like=boundaries[cluster.rank + 1],
            action=Noted,
        )
        loss = lesson.step(x, y)
        assert order == ["F0", "F1", "F2", "F3", "F4", "F5", "B0", "B1", "B2", "B3", "B4", "B5"]

        # The mean of the microbatches' means is the batch's mean, and the same holds for the gradients.
        if cluster.rank == 3:
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-9, atol=0)
        for parameter, gradient in zip(stage.parameters(), expected[cluster.rank], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-15)

    run_ranks(work, 4)
