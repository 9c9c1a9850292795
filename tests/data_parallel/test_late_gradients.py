"""Test gradients that no hook announces: they are computed after the backward, or not at all."""

import torch
import torch.distributed as dist

from lab.check import assert_same, gradients, reference_gradients
from lab.cluster import Cluster
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from pipeline_parallel.deferred import DeferredGradients, deferring
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import zb_h1
from tests.data_parallel.equivalence import OURS, WRAPPERS, mean_square, mine
from tests.data_parallel.small_models import HasNone, Middle, X, layers

ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # of ranks


def test_a_backward_may_return_no_gradient_for_a_parameter():
    def work(cluster: Cluster) -> None:
        expected = reference_gradients(HasNone(0), lambda model: mean_square(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(HasNone(cluster.rank))
            for _ in range(2):
                model.zero_grad()
                mean_square(model, *mine(cluster, (X,))).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all():
    """Gradients wait for those before them in the order, so one that no hook announces holds others up."""
    steps = {"both": 1.5, "none": None, "rank 0": 0.5, "rank 1": 1.0}  # who uses it: the mean of its gradient

    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(Middle())
            for users, middle in steps.items():
                model.zero_grad()
                uses_middle = users in ("both", f"rank {cluster.rank}")
                model(torch.full((1,), cluster.rank + 1.0).double(), uses_middle).backward()
                model.finish_gradient_sync()
                expected = {key: torch.tensor([1.5]) for key in ("first", "last")}
                expected["middle"] = None if middle is None else torch.tensor([middle])
                assert_same(gradients(model.module), expected, what=f"gradient of {name}, used by {users},")

    run_ranks(work, 2, timeout=20)


def test_a_parameter_that_is_used_keeps_a_gradient_of_zeros():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(Middle())
            model(torch.zeros(1).double(), True).backward()
            model.finish_gradient_sync()
            expected = {key: torch.zeros(1) for key in ("first", "middle", "last")}
            assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_weight_gradients_computed_after_the_backward_are_in_the_mean():
    """Zero bubble schedules compute weight gradients after the backward, and no hook announces them."""

    def work(cluster: Cluster) -> None:
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        parts = mine(cluster, (X,))[0].chunk(2)
        for name, wrap in OURS.items():
            model = wrap(layers(cluster.rank))
            for in_no_sync in (True, False):
                for step in range(3):
                    model.zero_grad(set_to_none=step < 2)
                    deferred = DeferredGradients()
                    for part in parts:
                        with deferring(deferred):
                            loss = mean_square(model, part) / len(parts)
                        if in_no_sync:
                            with model.no_sync():
                                loss.backward()
                        else:
                            loss.backward()
                        deferred.run()
                    model.finish_gradient_sync()
                    assert_same(gradients(model.module), expected, what=f"gradient of {name}, step {step},")

    run_ranks(work, 2)


def test_gradients_of_zero_bubble_stages_are_averaged_over_their_replicas():
    x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(16) % 3

    def work(cluster: Cluster) -> None:
        pipelines, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in (ROWS, COLUMNS))
        row, column = divmod(cluster.rank, 2)
        expected = reference_gradients(MLP([6, 9, 7, 5, 3]).double(), lambda m: loss_of(m(x), y))
        for name, wrap in OURS.items():
            model, (own_x, own_y) = MLP([6, 9, 7, 5, 3]).double(), (part.chunk(2)[row] for part in (x, y))
            pipeline = Pipeline(model, zb_h1(2, 4), loss_of, own_x[:2], group=pipelines[row])
            wrapper = wrap(pipeline.stages, replicas[column])
            for _ in range(2):
                wrapper.zero_grad()
                with wrapper.no_sync():
                    pipeline.step(own_x, own_y)
                wrapper.finish_gradient_sync()
                own = {key: p.grad for key, p in pipeline.named_own_parameters().items()}
                assert_same(own, {key: expected[key] for key in own}, what=f"gradient of {name}")

    run_ranks(work, 4)
