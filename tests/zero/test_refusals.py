"""Test that ZeRO refuses, in a sentence, what would train wrongly without an error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.zero.sharded import STAGES, Blocks, Sharded
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel


def backward(ours: Sharded) -> None:
    ours.model(torch.ones(2, 8)).sum().backward()


def forgets_to_finish(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    backward(ours)


def goes_backward_again_after_the_gradients_are_averaged(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.optimizer.finish_gradient_sync()
    ours.optimizer.finish_gradient_sync()  # which changes nothing
    ours.optimizer.step()
    backward(ours)


def goes_backward_twice(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    backward(ours)


def goes_backward_without_a_forward(_: str) -> None:
    model = FullyShardedDataParallel(Blocks())
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    model.finish_gradient_sync()
    loss.backward()


def goes_backward_after_a_step(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.model.finish_gradient_sync()
    loss = ours.model(torch.ones(2, 8)).sum()
    ours.optimizer.step()
    loss.backward()


def freezes_a_layer(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    ours.module.blocks[1].requires_grad_(False)
    backward(ours)
    ours.syncing.finish_gradient_sync()


def adds_a_group(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


REFUSED: list[tuple[Callable[[str], object], list[str], str]] = [
    (forgets_to_finish, STAGES, "finish_gradient_sync"),
    (goes_backward_again_after_the_gradients_are_averaged, ["zero1", "zero2"], "call zero_grad"),
    (goes_backward_twice, ["zero1"], "Another backward"),
    (goes_backward_without_a_forward, ["zero3"], "without a forward before it"),
    (goes_backward_after_a_step, ["zero3"], "stepped between a forward and its backward"),
    (freezes_a_layer, STAGES, "after wrapping"),
    (adds_a_group, ["zero2"], "all of them at once"),
    (
        lambda _: ZeroOptimizer(Blocks().parameters(), torch.optim.Adafactor),
        ["zero1"],
        "element by element",
    ),
    (lambda s: Sharded(s, Blocks(), "sgd").optimizer.state_dict(), ["zero1"], "its own shards only"),
    (lambda _: FullyShardedDataParallel(Blocks()).state_dict(), ["zero3"], "full_state_dict"),
    (lambda _: FullyShardedDataParallel(nn.Embedding(3, 2, sparse=True)), ["zero3"], "sparse"),
]


def test_what_would_train_wrongly_is_refused_in_a_sentence():
    def on_a_rank(cluster: Cluster) -> None:
        for work, stages, sentence in REFUSED:
            for stage in stages:
                with pytest.raises(WorkbookError, match=sentence):
                    work(stage)

    run_ranks(on_a_rank, 2, timeout=20)
