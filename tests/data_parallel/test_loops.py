"""Test that loops which DDP allows are right with our wrappers too, or are refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm.wire import slow_link
from lab.check import assert_same, gradients, parameters, reference_gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import (
    OURS,
    WRAPPERS,
    Odd,
    accumulate,
    examples,
    mean_square,
    mine,
    odd_loss,
)
from tests.data_parallel.small_models import X, layers

OVERLAPPING = {
    name: OURS[name] for name in ("overlap", "overlap by torch", "a bucket for each", "one bucket")
}


class Flexible(nn.Module):
    """A model that takes and returns values of many types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = layers(seed)

    def forward(
        self, x: dict[str, Tensor], factor: Tensor | None, *, bias: Tensor | None = None
    ) -> dict[str, Any]:
        y = self.layers(x["x"]) if factor is None else self.layers(x["x"]) * factor
        return {"y": (y if bias is None else y + bias, None), "of": "any kind"}


def test_inputs_and_outputs_may_be_of_any_type_and_passed_by_keyword():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        (first, _), (second, _) = (
            model(*args, **named)["y"]
            for args, named in ((({"x": x}, None), {"bias": x}), (({"x": x}, x), {}))
        )
        return (first * second).mean()

    def work(cluster: Cluster) -> None:
        expected = reference_gradients(Flexible(0), lambda model: loss(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(Flexible(cluster.rank))
            loss(model, *mine(cluster, (X,))).backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def gan(wrap: Callable[[nn.Module], nn.Module], x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
    """Take two steps of a GAN's loop and return the parameters after them."""
    generator, discriminator = wrap(layers(seed)), wrap(layers(seed + 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator)]
    for _ in range(2):
        fakes = (lambda: generator(x).detach(), lambda: generator(x))
        for optimizer, trained, fake in zip(optimizers, (discriminator, generator), fakes, strict=True):
            optimizer.zero_grad()
            mean_square(discriminator, fake()).backward()
            if hasattr(trained, "finish_gradient_sync"):
                trained.finish_gradient_sync()
            optimizer.step()
    return parameters(nn.ModuleList([generator, discriminator]))


def test_a_gans_discriminator_drops_the_gradients_of_the_generators_loss():
    def work(cluster: Cluster) -> None:
        expected = gan(lambda module: module, X)
        for name, wrap in WRAPPERS.items():
            result = gan(wrap, *mine(cluster, (X,)), 10 * cluster.rank)
            result = {key.replace("module.", ""): value for key, value in result.items()}
            assert_same(result, expected, what=f"parameter of {name}")

    run_ranks(work, 2)


def test_gradients_dropped_while_they_are_sent_do_not_reach_the_next_backward():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        for name, wrap in OVERLAPPING.items():
            model = wrap(layers())
            (5 * mean_square(model, x)).backward()
            slow_link.use(slow_link.parse("1gbit,20ms"))  # they are in flight for longer than a backward
            model.zero_grad()
            (5 * mean_square(model, x)).backward()
            model.zero_grad()
            mean_square(model, x).backward()
            model.finish_gradient_sync()
            slow_link.use(None)
            assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_a_backward_does_not_write_into_buckets_of_dropped_gradients_while_these_travel():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for name in ("a bucket for each", "one bucket"):
            model = OURS[name](layers())
            mean_square(model, x).backward()
            model.finish_gradient_sync()
            with slow_link.slowed(slow_link.parse("1gbit,50ms")):  # far longer than a backward
                model.zero_grad()
                mean_square(model, x).backward()
                dropped = list(model._in_flight)
                model.zero_grad()
                mean_square(model, x).backward()
                still_travel = [handle for handle in dropped if not handle.is_completed()]
                assert dropped and not still_travel
                model.finish_gradient_sync()

    run_ranks(work, 2)


def test_gradients_are_not_used_before_a_slow_link_has_brought_them():
    def work(cluster: Cluster) -> None:
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        for name, wrap in OVERLAPPING.items():
            model = wrap(layers())
            for _ in range(2):  # in the first step the buckets' order is sent, and waits for the buckets
                model.zero_grad()
                with slow_link.slowed(slow_link.parse("1gbit,20ms")):
                    mean_square(model, *mine(cluster, (X,))).backward()
                    model.finish_gradient_sync()
                    assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_a_dropped_backward_that_did_not_reach_all_layers_is_refused_on_all_ranks():
    """Ranks may have launched different numbers of buckets in that backward, and would mix them up."""

    def work(cluster: Cluster) -> None:
        model = OVERLAPPING["a bucket for each"](layers(cluster.rank))
        (x,) = mine(cluster, (X,))
        model.module[-1](x @ torch.ones(x.shape[-1], model.module[-1].in_features).to(x)).sum().backward()
        model.zero_grad()
        with pytest.raises(WorkbookError, match="Another backward began before finish_gradient_sync"):
            mean_square(model, x).backward()

    run_ranks(work, 2)


def test_zeroing_gradients_in_place_while_they_are_sent_is_refused_except_in_no_sync():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        for name, wrap in OVERLAPPING.items():
            for with_no_sync in (False, True):
                model = wrap(layers())
                if with_no_sync:
                    with model.no_sync():
                        mean_square(model, x).backward()
                else:
                    mean_square(model, x).backward()
                    model.zero_grad(set_to_none=False)
                    with pytest.raises(
                        WorkbookError, match=r"Another backward began .* inside the discriminator's"
                    ):
                        mean_square(model, x).backward()
                    model.finish_gradient_sync()
                model.zero_grad(set_to_none=False)
                mean_square(model, x).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: (model(X) * model(2 * X)).mean())
        thrice = reference_gradients(layers(), lambda model: 3 * mean_square(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(layers(cluster.rank))
            (model(x) * model(2 * x)).mean().backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), expected, what=f"gradient of two forwards, {name},")
            model.zero_grad()
            with model.no_sync():
                for _ in range(2):
                    mean_square(model, x).backward()
            mean_square(model, x).backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), thrice, what=f"gradient of three backwards, {name},")

    run_ranks(work, 2)


def test_after_an_error_in_a_backward_finish_gradient_sync_and_zero_grad_let_training_continue():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        batch = examples(cluster.world_size)
        expected = reference_gradients(Odd(0), lambda m: odd_loss(m, *batch))
        for name, wrap in OURS.items():
            model = wrap(Odd(cluster.rank))
            for failing_ranks in ((0, 1), (1,), ()):
                for in_no_sync in (True, False):
                    if cluster.rank in failing_ranks:
                        hook = model.module.first.weight.register_hook(fail)
                        with pytest.raises(ZeroDivisionError):
                            if in_no_sync:
                                with model.no_sync():
                                    odd_loss(model, *mine(cluster, batch)).backward()
                            odd_loss(model, *mine(cluster, batch)).backward()
                        hook.remove()
                    else:
                        odd_loss(model, *mine(cluster, batch)).backward()
                    model.finish_gradient_sync()
                    model.zero_grad()
                    accumulate(model, odd_loss, mine(cluster, batch), 2)
                    assert_same(gradients(model.module), expected, what=f"gradient of {name}")
                    model.zero_grad()

    run_ranks(work, 2)
