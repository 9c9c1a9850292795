"""Test that loops which torch's optimizers allow are right in stages 1 and 2."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same, parameters, reference_gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from pipeline_parallel.deferred import Later, compute_gradients, deferring
from tests.data_parallel.equivalence import mean_square, mine
from tests.data_parallel.small_models import HasNone, X, layers
from tests.zero.sharded import BOTH, averaged


def test_several_backwards_in_one_no_sync_and_two_forwards_before_a_backward_add_up():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda m: 3 * mean_square(m, X) + (m(X) * m(2 * X)).mean())
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
            for is_last_in_no_sync in (False, True):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    for _ in range(3):
                        mean_square(model, x).backward()
                with optimizer.no_sync() if is_last_in_no_sync else contextlib.nullcontext():
                    (model(x) * model(2 * x)).mean().backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")

    run_ranks(work, 2)


def test_a_gan_trains_as_in_one_process():
    def gan(make: Callable[..., torch.optim.Optimizer], x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
        generator, discriminator = layers(seed), layers(seed + 1)
        of_discriminator, of_generator = (make(m.parameters()) for m in (discriminator, generator))
        for _ in range(2):
            of_discriminator.zero_grad()
            mean_square(discriminator, generator(x).detach()).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            mean_square(discriminator, generator(x)).backward()
            of_generator.step()
        return parameters(nn.ModuleList([generator, discriminator]))

    def work(cluster: Cluster) -> None:
        expected = gan(lambda p: torch.optim.SGD(p, lr=0.1), X)
        for cls in BOTH:
            ours = gan(
                lambda p, cls=cls: cls(p, torch.optim.SGD, lr=0.1), *mine(cluster, (X,)), 10 * cluster.rank
            )
            assert_same(ours, expected, what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_a_step_runs_its_closure_and_synchronises_gradients():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for cls in BOTH:
            reference, model = layers(), layers(cluster.rank)
            mean_square(reference, X).backward()
            torch.optim.SGD(reference.parameters(), lr=0.1).step()
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)

            def closure(model=model) -> str:
                mean_square(model, x).backward()
                return "result"

            assert optimizer.step(closure) == "result"
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.zero_grad()
            with pytest.raises(WorkbookError, match="no rank has a gradient of any parameter"):
                optimizer.step()

    run_ranks(work, 2)


def test_a_second_finish_gradient_sync_changes_nothing():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
            mean_square(model, x).backward()
            optimizer.finish_gradient_sync()
            optimizer.finish_gradient_sync()
            assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")

    run_ranks(work, 2)


def test_a_dropped_backward_through_some_layers_does_not_change_later_microbatches():
    """With a feature-matching loss a GAN's generator uses only some layers of the discriminator."""

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: 2 * mean_square(model, X))
        for cls in BOTH:
            for is_last_in_no_sync in (False, True):
                model = layers(cluster.rank)
                optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
                optimizer.zero_grad()
                (7 * model[0](x).sum()).backward()
                model.zero_grad()
                # The backward of the next microbatch reaches the last layers first.
                with optimizer.no_sync():
                    mean_square(model, x).backward()
                with optimizer.no_sync() if is_last_in_no_sync else contextlib.nullcontext():
                    mean_square(model, x).backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")

    run_ranks(work, 3)


def test_missing_gradients_and_gradients_after_the_backward_are_right():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        without = reference_gradients(HasNone(0), lambda m: mean_square(m, X))
        expected = reference_gradients(layers(), lambda m: mean_square(m, X))
        for cls in BOTH:
            model: nn.Module = HasNone(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                mean_square(model, x).backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), without, what=f"gradient, {cls.__name__},")
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                later: Later = []
                for i, part in enumerate(x.chunk(2)):
                    with optimizer.no_sync() if i == 0 else contextlib.nullcontext():
                        with deferring(later):
                            loss = mean_square(model, part) / 2
                        loss.backward()
                        compute_gradients(later)
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__}, deferred,")

    run_ranks(work, 2)


def test_after_an_error_in_a_backward_finish_gradient_sync_and_zero_grad_let_training_continue():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda m: mean_square(m, X))
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
            for failing_ranks in ((0, 1), (1,)):
                if cluster.rank in failing_ranks:
                    hook = model[0].weight.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        mean_square(model, x).backward()
                    hook.remove()
                else:
                    mean_square(model, x).backward()
                with pytest.raises(WorkbookError, match="Another backward began before finish_gradient_sync"):
                    mean_square(model, x).backward()
                optimizer.finish_gradient_sync()
                optimizer.zero_grad()
                mean_square(model, x).backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")
                optimizer.zero_grad()

    run_ranks(work, 2)
