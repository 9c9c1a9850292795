"""Test that parameter groups and state of stages 1 and 2 work as in torch's optimizers, or are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square, mine
from tests.data_parallel.small_models import X, layers, train
from tests.zero.sharded import BOTH


def test_a_group_that_is_added_later_is_trained_as_in_one_process():
    def unfreeze_step_by_step(make: Callable[..., torch.optim.Optimizer], seed: int, x: Tensor) -> nn.Module:
        model = layers(seed)
        model[0].requires_grad_(False)
        optimizer = make(model.parameters())
        train(model, optimizer, x)
        train(model, optimizer, x)
        model[0].requires_grad_(True)
        model.append(nn.Linear(3, 3).double())
        torch.manual_seed(seed + 7)
        nn.init.normal_(model[3].weight)
        nn.init.zeros_(model[3].bias)
        if isinstance(optimizer, BOTH):
            optimizer.zero_grad()
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.add_param_group({"params": [model[3].weight, model[3].bias]})
        else:
            optimizer.param_groups[0]["params"] = list(model[2].parameters())
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.add_param_group({"params": model[3].parameters()})
        train(model, optimizer, x)
        train(model, optimizer, x)
        return model

    def work(cluster: Cluster) -> None:
        reference = unfreeze_step_by_step(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0, X)
        for cls in BOTH:
            model = unfreeze_step_by_step(
                lambda p, cls=cls: cls(p, torch.optim.SGD, lr=0.1, momentum=0.9),
                cluster.rank,
                *mine(cluster, (X,)),
            )
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    for n in (1, 3):
        run_ranks(work, n)


def test_a_group_that_cannot_be_added_is_refused():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model = layers()
            optimizer = cls(model[0].parameters(), torch.optim.SGD, lr=0.1)
            with pytest.raises(WorkbookError, match="was given a parameter that another group has"):
                optimizer.add_param_group({"params": model.parameters()})
            mean_square(model, X).backward()
            with pytest.raises(
                WorkbookError, match=r"came in the middle of a step: call it after zero_grad\(\)"
            ):
                optimizer.add_param_group({"params": model[2].parameters()})
            optimizer.zero_grad()

    run_ranks(work, 2)


def test_the_optimizer_state_of_another_rank_is_refused_and_a_ranks_own_is_loaded():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            train(model, optimizer, *mine(cluster, (X,)))
            own, at_first = copy.deepcopy(optimizer.state_dict()), parameters(model)
            rank_0s = [own]
            dist.broadcast_object_list(rank_0s, src=0)
            plain = torch.optim.SGD(layers().parameters(), lr=0.1, momentum=0.9).state_dict()
            for state in (rank_0s[0], plain):  # rank 0 loads its own state, and refuses all the same
                with pytest.raises(WorkbookError, match="fits its own rank of an equal run only"):
                    optimizer.load_state_dict(state)
            train(model, optimizer, *mine(cluster, (X,)))

            resumed = layers()
            resumed.load_state_dict(at_first)
            again = cls(resumed.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)
            again.load_state_dict(own)
            train(resumed, again, *mine(cluster, (X,)))
            assert_same(parameters(resumed), parameters(model), 0, f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_a_second_optimizer_over_the_same_parameters_replaces_the_first():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model, reference = layers(cluster.rank), layers()
            for _ in range(2):
                train(model, cls(model.parameters(), torch.optim.SGD, lr=0.1), *mine(cluster, (X,)))
                train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), X)
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)
