"""Test that uses of a wrapped module which could let replicas drift apart are right, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.check import assert_same, gradients, parameters, reference_gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import OURS, WRAPPERS, mean_square, mine
from tests.data_parallel.small_models import X, layers, train


def test_a_step_without_finish_gradient_sync_is_refused():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, fused=True)):
                model = wrap(layers())
                optimizer, before = make(model.parameters()), parameters(model)
                mean_square(model, *mine(cluster, (X,))).backward()
                with pytest.raises(
                    WorkbookError, match=r"optimizer.step\(\) came before finish_gradient_sync\(\)"
                ):
                    optimizer.step()
                assert_same(parameters(model), before, 0, f"parameter of {name}")
                model.finish_gradient_sync()
                optimizer.step()
                with model.no_sync():  # steps of each rank's own, on purpose
                    mean_square(model, *mine(cluster, (X,))).backward()
                optimizer.step()
                model.zero_grad()
                model.finish_gradient_sync()

    run_ranks(work, 2)


def unfreeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(True)


def assign(module: nn.Sequential) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def cast(module: nn.Sequential) -> None:
    module[2].float().weight.requires_grad_(True)


def add(module: nn.Sequential) -> None:
    module.append(nn.Linear(3, 3).double())


def test_a_parameter_added_after_wrapping_is_refused_until_the_module_is_wrapped_again():
    changes = ((unfreeze, "0.weight"), (assign, "0.bias"), (cast, "2.weight"), (add, "3.weight"))

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for name, wrap in OURS.items():
            for change, parameter in changes:
                module = layers(cluster.rank)
                module[0].weight.requires_grad_(False)
                model = wrap(module)
                train(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
                change(module)
                with torch.no_grad():
                    if change is not cast:
                        model(x)
                with pytest.raises(
                    WorkbookError, match=f"{parameter} was unfrozen, replaced, cast, moved or added"
                ):
                    model(x)
                model = wrap(module.double())
                reference = layers()
                if change is add:
                    reference.append(nn.Linear(3, 3).double())
                reference.load_state_dict(module.state_dict())
                for _ in range(2):
                    model.zero_grad()
                    mean_square(model, x).backward()
                    model.finish_gradient_sync()
                    expected = reference_gradients(reference, lambda m: mean_square(m, X))
                    if not module[0].weight.requires_grad:
                        expected["0.weight"] = None
                    assert_same(
                        gradients(module), expected, what=f"gradient of {name} after {change.__name__},"
                    )

    run_ranks(work, 2)


def test_a_parameter_that_is_frozen_after_wrapping_has_no_gradient():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(layers(cluster.rank))
            model.module[0].requires_grad_(False)
            mean_square(model, *mine(cluster, (X,))).backward()
            model.finish_gradient_sync()
            expected = reference_gradients(layers(), lambda m: mean_square(m, X))
            assert_same(gradients(model.module), expected | {"0.weight": None, "0.bias": None}, what=name)

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


def test_sparse_gradients_are_refused_with_advice():
    advice = "has another size on each rank, so it cannot be averaged here; leave sparse=True out"

    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            with pytest.raises(WorkbookError, match=f"1 has a sparse gradient: it {advice}"):
                wrap(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True)))
            wrap(nn.Embedding(5, 2, sparse=True).requires_grad_(False))
            model = wrap(nn.Embedding(5, 2))
            with pytest.raises(
                WorkbookError, match=rf"A sparse gradient of shape \(5, 2\) came: it {advice}"
            ):
                F.embedding(torch.tensor([cluster.rank]), model.module.weight, sparse=True).sum().backward()

    run_ranks(work, 2)
