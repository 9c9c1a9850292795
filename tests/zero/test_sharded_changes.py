"""Test that parameters which were changed after the optimizer of stage 1 or 2 was made are refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square, mine
from tests.data_parallel.small_models import X, layers, train
from tests.zero.sharded import BOTH


def test_a_parameter_that_was_changed_on_one_rank_is_refused_on_all_ranks():
    def unfreeze(model: nn.Module) -> None:
        model[0].weight.requires_grad_(True)

    def cast(model: nn.Module) -> None:
        model.float()

    def sparse(model: nn.Module) -> None:
        F.embedding(torch.tensor([1]), model[2].weight, sparse=True).sum().backward()

    changes = {
        unfreeze: r"shape \(5, 3\) was unfrozen after the optimizer was made: give it to add_param_group\(\)",
        cast: "was cast or moved after the optimizer was made: make the optimizer again",
        sparse: r"sparse gradient of shape \(3, 5\) came",
    }

    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            for change, sentence in changes.items():
                model = layers()
                model[0].weight.requires_grad_(False)
                optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
                before = parameters(model)
                if cluster.rank == 1:
                    change(model)
                if not (change is sparse and cluster.rank == 1):
                    mean_square(model, X.to(model[2].weight.dtype)).backward()
                own = sentence if cluster.rank == 1 else "another rank refuses"
                with pytest.raises(WorkbookError, match=own):
                    optimizer.step()
                assert_same(parameters(model.double()), before, 1e-6, "parameter")

            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            mean_square(model, X).backward()
            with pytest.raises(WorkbookError, match="was replaced after the optimizer was made"):
                optimizer.step()
            again, reference = cls(model.parameters(), torch.optim.SGD, lr=0.1), layers()
            train(model, again, *mine(cluster, (X,)))
            train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), X)
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def assign(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.full((3, 5), 0.5).double())


def replace(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 3, bias=False).double()
    nn.init.constant_(model[2].weight, 0.5)


def test_replaced_parameters_are_refused_until_the_optimizer_has_them():
    sentences = {
        assign: "weight of a Linear was replaced after the optimizer was made, and would not be trained",
        replace: "2 of a Sequential was replaced after the optimizer was made, and would not be trained",
    }

    def trained(change: Callable[[nn.Sequential], None]) -> nn.Module:
        """Return one process's model; its optimizer keeps the old parameters, without gradients."""
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, X)
        change(model)
        optimizer.add_param_group({"params": [model[2].weight]})
        train(model, optimizer, X)
        return model

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for cls in BOTH:
            for change, sentence in sentences.items():
                model, expected = layers(cluster.rank), trained(change)
                optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
                train(model, optimizer, x)
                optimizer.zero_grad()
                for changing in (1, 0):
                    if cluster.rank == changing:
                        change(model)
                    before = parameters(model)
                    mean_square(model, x).backward()
                    own = sentence if cluster.rank >= changing else "another rank refuses"
                    with pytest.raises(WorkbookError, match=own):
                        optimizer.step()
                    assert_same(parameters(model), before, 0, f"parameter, {cls.__name__},")
                    optimizer.zero_grad()
                optimizer.add_param_group({"params": [model[2].weight]})
                train(model, optimizer, x)
                assert_same(parameters(model), parameters(expected), what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_parameters_that_are_exchanged_temporarily_or_have_another_optimizer_are_allowed():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for cls in BOTH:
            model = layers()
            optimizer, kept = cls(model.parameters(), torch.optim.SGD, lr=0.1), model[2].weight
            for _ in range(2):
                train(model, optimizer, x)
                assign(model)  # as for an evaluation with averaged weights
                model[2].weight = kept
            replace(model)
            train(model, cls(model[2].parameters(), torch.optim.SGD, lr=0.1), x)
            train(model, optimizer, x)

    run_ranks(work, 2)
