"""Test uses of a wrapper that would let replicas drift apart: each is right, or refused in a sentence."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import (
    OURS,
    WRAPPERS,
    Odd,
    accumulate,
    examples,
    mean_gradients,
    mean_square,
    mine,
    odd_loss,
    one_process,
)
from tests.data_parallel.small_models import X, layers, train

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
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), *mine(cluster, (X,)))
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
        for name, wrap in OURS.items():
            with pytest.raises(WorkbookError, match="1 has sparse gradients"):
                wrap(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True)))
            if name in OVERLAPPING:
                model = wrap(nn.Embedding(5, 2))
                with pytest.raises(
                    WorkbookError, match=r"A parameter of shape \(5, 2\) has sparse gradients"
                ):
                    F.embedding(torch.tensor([1]), model.module.weight, sparse=True).sum().backward()

    run_ranks(work, 2)


def test_an_optimizer_made_before_wrapping_trains_the_wrapped_module():
    def work(cluster: Cluster) -> None:
        reference = layers()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            train(reference, optimizer, X)
        for name, wrap in WRAPPERS.items():
            module = layers(cluster.rank)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = wrap(module)
            for _ in range(2):
                train(model, optimizer, *mine(cluster, (X,)))
            assert_same(parameters(module), parameters(reference), what=f"parameter of {name}")

    run_ranks(work, 2)


def test_a_gan_drops_the_gradients_that_its_generator_leaves_in_the_discriminator():
    """The generator's backward runs in the discriminator's no_sync()."""

    def gan(wrap, x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
        generator, discriminator = wrap(layers(seed)), wrap(layers(seed + 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator)]
        for _ in range(2):
            train(discriminator, optimizers[0], generator(x).detach())
            optimizers[1].zero_grad()
            is_wrapped = hasattr(discriminator, "no_sync")
            with discriminator.no_sync() if is_wrapped else contextlib.nullcontext():
                mean_square(discriminator, generator(x)).backward()
            if is_wrapped:
                generator.finish_gradient_sync()
            optimizers[1].step()
        both = nn.ModuleList([generator, discriminator])
        return {name.replace("module.", ""): value for name, value in parameters(both).items()}

    def work(cluster: Cluster) -> None:
        expected = gan(lambda module: module, X)
        for name, wrap in OURS.items():
            result = gan(wrap, *mine(cluster, (X,)), 10 * cluster.rank)
            assert_same(result, expected, what=f"parameter of {name}")

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
