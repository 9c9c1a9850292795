"""Test that local SGD averages as data parallelism, torch's averagers and workers in one process do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from low_communication.train_local_sgd import LocalSGD
from tests.low_communication.equivalence import (
    Task,
    Workers,
    adamw,
    assert_equals,
    assert_replicas_equal,
    momentum,
    payload,
    sgd,
    train_step,
)
from tests.wrappers import Odd, in_pairs


def test_with_h_1_sgd_equals_data_parallel_bit_for_bit():
    """All numbers are multiples of 2**-24, and small: float64 rounds no sum of them, in any order."""

    def work(cluster: Cluster) -> None:
        def model() -> nn.Module:
            layer = nn.Linear(3, 4).double()
            for parameter in layer.parameters():
                parameter.data = torch.arange(parameter.numel()).double().view_as(parameter) / 16
            return layer

        averaging, data_parallel = LocalSGD(model(), 1), BucketDataParallel(model())
        optimizers = [torch.optim.SGD(m.parameters(), lr=1 / 64) for m in (averaging, data_parallel)]
        for step in range(3):
            x = torch.arange(6).double().view(2, 3) % (step + 2) + cluster.rank
            for wrapped, optimizer in zip((averaging, data_parallel), optimizers, strict=True):
                optimizer.zero_grad()
                (wrapped(x).square().sum() / 4).backward()
                if wrapped is data_parallel:
                    data_parallel.finish_gradient_sync()
                optimizer.step()
            assert averaging.after_step(optimizers[0])
            expected = parameters(data_parallel)
            assert_same(parameters(averaging), expected, 0, f"parameter, step {step},")

    run_ranks(work, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_with_h_1_sgd_equals_one_process(world_size: int):
    def work(cluster: Cluster) -> None:
        task = Task("odd", world_size)
        reference, model = task.make(0), LocalSGD(task.make(cluster.rank), 1)
        assert_same(model.module.state_dict(), reference.state_dict(), 0, "initial parameter")
        ours, theirs = sgd(model.parameters()), sgd(reference.parameters())
        for step in range(3):
            theirs.zero_grad()
            task.loss(reference, *(part.roll(7 * step, 0) for part in task.batch)).backward()
            theirs.step()
            train_step(cluster, task, model, ours, step)
            model.after_step(ours)
        assert_same(parameters(model.module), parameters(reference), what="parameter")
        assert_replicas_equal(cluster, model, "after three steps")

    run_ranks(work, world_size)


def test_with_momentum_it_equals_torchs_averagers_in_every_step():
    """torch averages after step 1 + warm-up, and then periodically: a warm-up of H - 1 steps is our order."""

    def work(cluster: Cluster) -> None:
        task, h = Task("gpt", 3), 3
        model, averaged, wrapped = LocalSGD(task.make(cluster.rank), h), task.make(0), task.make(0)
        ours, plain = momentum(model.parameters()), momentum(averaged.parameters())
        averager = PeriodicModelAverager(period=h, warmup_steps=h - 1)
        post = PostLocalSGDOptimizer(
            momentum(wrapped.parameters()), PeriodicModelAverager(period=h, warmup_steps=h - 1)
        )
        for step in range(8):
            train_step(cluster, task, model, ours, step)
            assert model.after_step(ours) == (step % h == h - 1)
            train_step(cluster, task, averaged, plain, step)
            averager.average_parameters(averaged.parameters())
            train_step(cluster, task, wrapped, post, step)
            for expected in (averaged, wrapped):
                assert_same(parameters(model.module), parameters(expected), what=f"parameter, step {step},")

    run_ranks(work, 3)


def test_state_stays_on_its_rank_or_is_averaged_with_average_state():
    def work(cluster: Cluster) -> None:
        for averages in (False, True):
            task, what = Task("gpt", 3), f"average_state={averages}"
            workers = Workers(task, adamw)
            model = LocalSGD(task.make(cluster.rank), 2, average_state=averages)
            optimizer = adamw(model.parameters())
            for step in range(5):
                workers.step()
                train_step(cluster, task, model, optimizer, step)
                if model.after_step(optimizer):
                    workers.average()
                    for name in workers.trained if averages else ():
                        states = workers.states(name)
                        for key in ("exp_avg", "exp_avg_sq"):
                            mean = torch.stack([state[key] for state in states]).mean(0)
                            for state in states:
                                state[key].copy_(mean)
                assert_equals(cluster, model, workers, f"{what}, step {step}")
            model.average(optimizer)
            assert_replicas_equal(cluster, model, what)

    run_ranks(work, 3)


def test_the_state_of_a_parameter_with_one_number_is_averaged_too():
    def work(cluster: Cluster) -> None:
        model = LocalSGD(nn.ParameterList([torch.ones(())]), 1, average_state=True)
        [parameter] = model.parameters()
        optimizer = momentum([parameter])
        parameter.grad = torch.tensor(float(cluster.rank))
        optimizer.step()
        model.average(optimizer)
        assert optimizer.state[parameter]["momentum_buffer"] == 0.5

    run_ranks(work, 2)


def test_frozen_unused_and_permuted_parameters_equal_workers_in_one_process():
    def work(cluster: Cluster) -> None:
        task = Task("odd", 3)
        workers, model = Workers(task, momentum), LocalSGD(task.make(cluster.rank), 3)
        optimizer = momentum(model.parameters())
        for step in range(6):
            workers.step()
            train_step(cluster, task, model, optimizer, step)
            if model.after_step(optimizer):
                workers.average()
            assert_equals(cluster, model, workers, f"step {step}")

    run_ranks(work, 3)


def test_ranks_average_within_their_group():
    def work(cluster: Cluster) -> None:
        group, pair, _ = in_pairs(cluster)
        model = LocalSGD(nn.Linear(1, 1, bias=False), 1, group)
        nn.init.constant_(model.module.weight, cluster.rank)
        model.average(sgd(model.parameters()))
        assert model.module.weight.item() == pair + 1  # of 0 and 2, or of 1 and 3

    run_ranks(work, 4)


def test_it_sends_a_rings_bytes_once_in_h_steps():
    def work(cluster: Cluster) -> None:
        n = cluster.world_size
        for h, steps, make_optimizer, copies in ((1, 3, sgd, 1), (3, 7, momentum, 2), (4, 8, adamw, 3)):
            model = LocalSGD(nn.Linear(5, 6), h, average_state=True)  # 36 numbers
            optimizer, rounds = make_optimizer(model.parameters()), 0
            start, before = LEDGER.total(), payload()
            for _ in range(steps):
                model(torch.ones(1, 5)).sum().backward()
                optimizer.step()
                rounds += model.after_step(optimizer)
            assert payload() - before == steps // h * 2 * (n - 1) * copies * 36 * 4 // n
            assert LEDGER.total() - start == model.traffic(optimizer) * rounds

    run_ranks(work, 3)


def test_what_would_train_wrongly_is_refused_in_a_sentence():
    def work(cluster: Cluster) -> None:
        with pytest.raises(WorkbookError, match=r"^sync_every is 0: it is a number of steps, at least 1.$"):
            LocalSGD(nn.Linear(1, 1), 0)
        model = LocalSGD(Odd(0), 1, average_state=True)  # has a layer that is not used
        optimizer = momentum(model.parameters())
        train_step(cluster, Task("odd", 2), model, optimizer, 0)
        with pytest.raises(WorkbookError, match=r"has had no gradient on this rank.*leave average_state out"):
            model.average(optimizer)
        model.module.first.requires_grad_(False)
        with pytest.raises(WorkbookError, match=r"first.weight was added, .*frozen.* after wrapping"):
            model(torch.ones(1, 7).double())
        dist.barrier()

    run_ranks(work, 2)
