"""Test uses of a wrapper that would let replicas drift apart: each is right, or refused in a sentence."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import (
    OURS,
    Odd,
    X,
    accumulate,
    examples,
    layers,
    mean_gradients,
    mean_square,
    mine,
    odd_loss,
    one_process,
)

OVERLAPPING = ("overlap", "a bucket for each", "one bucket")


def test_a_second_backward_before_finish_gradient_sync_is_refused():
    def work(cluster: Cluster) -> None:
        for name in OVERLAPPING:
            model = OURS[name](nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()
            for sync in (contextlib.nullcontext, model.no_sync):
                with sync(), pytest.raises(WorkbookError, match="Another backward began before finish"):
                    model(torch.ones(1, 2)).sum().backward()

    run_ranks(work, 2)


def test_a_parameter_that_is_added_or_frozen_after_wrapping_is_refused():
    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            model = wrap(layers(cluster.rank))
            accumulate(model, lambda model, x, _: mean_square(model, x), mine(cluster, (X, X)), 1)
            model.module.append(nn.Linear(3, 3).double())
            with pytest.raises(WorkbookError, match=r"^3.weight was added, .* after wrapping"):
                model(X)
            del model.module[3]
            model.module[0].requires_grad_(False)
            with pytest.raises(WorkbookError, match=r"^0.weight was added, .* frozen, .* after wrapping"):
                model(X)

    run_ranks(work, 2)


def test_sparse_gradients_are_refused():
    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            with pytest.raises(WorkbookError, match="1 has sparse gradients"):
                wrap(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True)))

    run_ranks(work, 2)


def test_after_an_error_in_a_backward_finish_gradient_sync_and_zero_grad_let_training_continue():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        batch = examples(cluster.world_size)
        expected = one_process(Odd(0), lambda m: odd_loss(m, *batch))
        for name, wrap in OURS.items():
            model = wrap(Odd(cluster.rank))
            for failing_ranks in ((0, 1), (1,)):
                if cluster.rank in failing_ranks:
                    hook = model.module.first.weight.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        odd_loss(model, *mine(cluster, batch)).backward()
                    hook.remove()
                else:
                    odd_loss(model, *mine(cluster, batch)).backward()
                model.finish_gradient_sync()
                model.zero_grad()
                accumulate(model, odd_loss, mine(cluster, batch), 2)
                assert_same(mean_gradients(model.module), expected, what=f"gradient of {name}")
                model.zero_grad()

    run_ranks(work, 2)
