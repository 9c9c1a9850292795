"""Test that plain DiLoCo's ranks equal workers in one process, whose outer optimizer is torch's SGD."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from low_communication.train_diloco import StreamingDiLoCo
from low_communication.train_diloco_plain import DiLoCo
from low_communication.train_local_sgd import LocalSGD
from tests.low_communication.equivalence import (
    OuterSteps,
    Task,
    Workers,
    adamw,
    assert_equals,
    assert_replicas_equal,
    momentum,
    sgd,
    train_step,
)
from tests.wrappers import Odd, in_pairs


def compare(cluster: Cluster, name: str, mu: float) -> None:
    """Compare three rounds of two steps: all gradients and parameters, in each step."""
    task = Task(name, cluster.world_size)
    workers, model = Workers(task, adamw), DiLoCo(task.make(cluster.rank), outer_momentum=mu)
    outer, optimizer = OuterSteps(workers, [workers.trained], 2, mu=mu), adamw(model.parameters())
    for step in range(6):
        what = f"{name}, {cluster.world_size} ranks, momentum {mu}, step {step}"
        workers.step()
        train_step(cluster, task, model, optimizer, step)
        expected = gradients(workers.models[cluster.rank])
        assert_same(gradients(model.module), expected, what=f"gradient, {what},")
        outer.after_step()
        if step % 2:
            model.outer_step()
            assert_replicas_equal(cluster, model, what)
        assert_equals(cluster, model, workers, what)


def both(cluster: Cluster) -> None:
    compare(cluster, "gpt", mu=0.9)  # tied weights
    compare(cluster, "odd", mu=0.9)  # frozen and unused parameters, and permuted strides
    compare(cluster, "odd", mu=0.0)


def test_three_rounds_of_two_ranks_equal_workers_in_one_process():
    run_ranks(both, 2)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_numbers_of_ranks_equal_as_many_workers_in_one_process(world_size: int):
    run_ranks(both, world_size)


def test_an_outer_rate_of_1_without_momentum_is_local_sgd():
    def work(cluster: Cluster) -> None:
        task = Task("gpt", 3)
        local, diloco = LocalSGD(task.make(0), 3), DiLoCo(task.make(0), outer_lr=1.0, outer_momentum=0.0)
        optimizers = [momentum(model.parameters()) for model in (local, diloco)]
        for step in range(6):
            for model, optimizer in zip((local, diloco), optimizers, strict=True):
                train_step(cluster, task, model, optimizer, step)
            if local.after_step(optimizers[0]):
                diloco.outer_step()
            assert_same(parameters(diloco), parameters(local), what=f"parameter, step {step},")

    run_ranks(work, 3)


def test_streaming_without_its_options_is_this_diloco():
    def work(cluster: Cluster) -> None:
        task = Task("gpt", 2)
        streaming, plain = StreamingDiLoCo(task.make(0), 2), DiLoCo(task.make(0))
        optimizers = [sgd(model.parameters()) for model in (streaming, plain)]
        for step in range(4):
            for model, optimizer in zip((streaming, plain), optimizers, strict=True):
                train_step(cluster, task, model, optimizer, step)
            streaming.after_step()
            if step % 2:
                plain.outer_step()
            assert_same(parameters(streaming), parameters(plain), what=f"parameter, step {step},")

    run_ranks(work, 2)


def test_the_mean_is_over_the_ranks_of_a_group():
    def work(cluster: Cluster) -> None:
        group, pair, _ = in_pairs(cluster)
        model = DiLoCo(nn.Linear(1, 1, bias=False), group, outer_lr=1.0, outer_momentum=0.0)
        nn.init.constant_(model.module.weight, cluster.rank)
        model.outer_step()
        assert model.module.weight.item() == pytest.approx(pair + 1)  # of 0 and 2, or of 1 and 3

    run_ranks(work, 4)


def test_an_outer_step_sends_a_rings_bytes_and_a_step_nothing():
    def work(cluster: Cluster) -> None:
        n, model = cluster.world_size, DiLoCo(nn.Linear(5, 6))  # 36 numbers
        before = LEDGER.total()
        model(torch.ones(1, 5)).sum().backward()
        sgd(model.parameters()).step()
        assert LEDGER.total() == before
        model.outer_step()
        assert LEDGER.total() - before == model.traffic() == Traffic(2 * (n - 1) * 36 * 4 // n, 2 * (n - 1))

    run_ranks(work, 3)


def test_a_module_that_is_changed_after_wrapping_is_refused():
    def work(cluster: Cluster) -> None:
        model = DiLoCo(Odd(0))
        model.module.first.requires_grad_(False)
        with pytest.raises(WorkbookError, match=r"first.weight was added, .*frozen.* after wrapping"):
            model(torch.ones(1, 7).double())
        dist.barrier()

    run_ranks(work, 2)
