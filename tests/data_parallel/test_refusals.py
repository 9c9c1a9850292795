"""Test uses of a wrapper that would let replicas drift apart: each is right, or refused in a sentence."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import BabyCNN
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
    no_sync,
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
            for sync in (contextlib.nullcontext, no_sync):
                with sync(model), pytest.raises(WorkbookError, match="Another backward began before finish"):
                    model(torch.ones(1, 2)).sum().backward()

    run_ranks(work, 2)


def test_a_parameter_that_is_added_or_frozen_after_wrapping_is_refused():
    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            model = wrap(layers(cluster.rank))
            accumulate(model, lambda model, x, _: mean_square(model, x), mine(cluster, (X, X)), 1)
            model.module.append(nn.Linear(3, 3).double())
            with pytest.raises(WorkbookError, match=r"^The parameter 3.weight was added, .* after wrapping"):
                model(X)
            del model.module[3]
            model.module[0].requires_grad_(False)
            with pytest.raises(
                WorkbookError, match=r"^The parameter 0.weight was added, .* frozen, .* after wrapping"
            ):
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


def test_a_step_before_finish_gradient_sync_is_refused_at_once_and_one_with_a_closure_too():
    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            model = wrap(layers(0))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def closure(model: Any = model) -> Tensor:
                loss = mean_square(model, X)
                loss.backward()
                return loss

            with pytest.raises(WorkbookError, match="without a closure"):
                optimizer.step(closure)
            closure()
            with pytest.raises(WorkbookError, match=r"^Call finish_gradient_sync"):
                optimizer.step()
            model.finish_gradient_sync()
            optimizer.step()
            model.zero_grad()
            with no_sync(model):
                closure()
            with pytest.raises(WorkbookError, match=r"^Call finish_gradient_sync"):
                optimizer.step()
            model.finish_gradient_sync()

    run_ranks(work, 2)


def test_a_layer_in_two_reentrant_checkpoints_is_right_or_refused_by_name():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, self.first(x), use_reentrant=True)
            return x

    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(Twice())
            if name != "naive":
                with pytest.raises(WorkbookError, match="use_reentrant=False"):
                    model(X).sum().backward()
            else:
                model(X).sum().backward()
            model.finish_gradient_sync()

    run_ranks(work, 2)


def test_a_compiled_module_is_refused_with_the_cure():
    class Compiled(nn.Module):  # torch.compile would import a compiler for seconds
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)

    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            with pytest.raises(WorkbookError, match=r"module\.compile\(\)"):
                wrap(nn.Sequential(Compiled()))

    run_ranks(work, 2)


def test_a_copy_of_a_wrapper_with_a_group_of_its_own_sends_in_the_same_group():
    def work(cluster: Cluster) -> None:
        group = dist.new_group([0, 1])
        for wrap in OURS.values():
            model = wrap(nn.Linear(2, 2), group=group)
            assert copy.deepcopy(model).group is group

    run_ranks(work, 2)


def test_fused_optimizers_find_gradients_in_the_order_of_their_parameters():
    """channels_last permutes strides, and a fused optimizer pairs elements by their place in memory."""

    def trained(model: Any, module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if model is not module:
                model.finish_gradient_sync()
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def cnn() -> BabyCNN:
        return BabyCNN().double().to(memory_format=torch.channels_last)

    def work(cluster: Cluster) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(10, (8,), generator=generator)
        module = cnn()
        expected = trained(module, module, x, y)
        for name, wrap in OURS.items():
            module = cnn()
            own = trained(wrap(module), module, x.chunk(2)[cluster.rank], y.chunk(2)[cluster.rank])
            assert_same(own, expected, what=f"parameter of {name}")

    run_ranks(work, 2)
