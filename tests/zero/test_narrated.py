"""Tell, in one straight line for each stage of ZeRO, why it equals one process."""

import copy

import torch
from torch import nn

from lab.cluster import Cluster
from lab.ranks import run_ranks
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel


def test_zero1_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        # One process trains this model on a batch of 12 examples. All ranks compute that, to compare.
        torch.manual_seed(0)
        x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
        one = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer_of_one = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)

        # The ranks train a model of the same class. Only rank 0 starts from the same parameters: the others
        # have to get them from rank 0.
        model = copy.deepcopy(one)
        if cluster.rank > 0:
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        mine = slice(4 * cluster.rank, 4 * cluster.rank + 4)  # each rank has a third of the batch

        for _ in range(3):
            # The backward fills gradients; then they are reduce-scattered.
            optimizer_of_one.zero_grad()
            (one(x) - y).square().mean().backward()
            optimizer.zero_grad()
            (model(x[mine]) - y[mine]).square().mean().backward()
            optimizer.finish_gradient_sync()

            # Now this rank has the mean over all 12 examples, of the part that it owns of each parameter.
            for shard, expected in zip(reversed(optimizer.parameter_shards), one.parameters(), strict=True):
                part = slice(shard.start, shard.start + shard.tensor.numel())
                torch.testing.assert_close(
                    shard.tensor.grad, expected.grad.flatten()[part], rtol=1e-9, atol=0
                )

            # The optimizer updates that part. After the all-gather every rank has all new parameters.
            optimizer_of_one.step()
            optimizer.step()
            for parameter, expected in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=0)

        # The gain: this rank holds the momentum of its own part only.
        return sum(state["momentum_buffer"].numel() for state in optimizer.state.values())

    # 5*7 + 7 + 7*3 + 3 = 66 numbers are trained, and every one of them is updated on one rank.
    assert run_ranks(train_on_a_rank, 3) == [22, 22, 22]


def test_zero2_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> None:
        # One process trains this model on a batch of 12 examples. All ranks compute that, to compare.
        torch.manual_seed(0)
        x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
        one = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer_of_one = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)

        # The ranks train a model of the same class, from rank 0's parameters.
        model = copy.deepcopy(one)
        if cluster.rank > 0:
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        optimizer = ZeroGradientOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        mine = slice(4 * cluster.rank, 4 * cluster.rank + 4)  # each rank has a third of the batch

        for _ in range(3):
            optimizer_of_one.zero_grad()
            (one(x) - y).square().mean().backward()

            # A rank computes its third in two microbatches. Each sends its gradients as soon as they are
            # there, so that neither leaves any in the model; their means add up where they are owned.
            optimizer.zero_grad()
            xs, ys = x[mine].chunk(2), y[mine].chunk(2)
            with optimizer.no_sync():
                ((model(xs[0]) - ys[0]).square().mean() / 2).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            ((model(xs[1]) - ys[1]).square().mean() / 2).backward()
            optimizer.finish_gradient_sync()

            # Now this rank has the mean over all 12 examples, of the part that it owns of each parameter.
            for shard, expected in zip(reversed(optimizer.parameter_shards), one.parameters(), strict=True):
                part = slice(shard.start, shard.start + shard.tensor.numel())
                torch.testing.assert_close(
                    shard.tensor.grad, expected.grad.flatten()[part], rtol=1e-9, atol=0
                )

            # The optimizer updates that part. After the all-gather every rank has all new parameters.
            optimizer_of_one.step()
            optimizer.step()
            for parameter, expected in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=0)

    run_ranks(train_on_a_rank, 3)


def test_zero3_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        # One process trains this model on a batch of 12 examples. All ranks compute that, to compare.
        torch.manual_seed(0)
        x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
        one = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer_of_one = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)

        # The ranks train a model of the same class, from rank 0's parameters. Its two linear layers are
        # blocks: each is gathered when its forward and its backward begin, and freed when they end.
        module = copy.deepcopy(one)
        if cluster.rank > 0:
            for parameter in module.parameters():
                nn.init.normal_(parameter)
        model = FullyShardedDataParallel(module)
        _, [first_layer], [second_layer] = model.blocks  # a block has one unit; the root has none
        full_in_forward = []
        module[2].register_forward_hook(
            lambda *_: full_in_forward.append((first_layer.is_full, second_layer.is_full)),
            prepend=True,
        )

        # `parameters()` yields the rank's shard of each parameter, and torch's optimizer needs nothing else.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mine = slice(4 * cluster.rank, 4 * cluster.rank + 4)  # each rank has a third of the batch

        for _ in range(3):
            optimizer_of_one.zero_grad()
            (one(x) - y).square().mean().backward()
            optimizer.zero_grad()
            (model(x[mine]) - y[mine]).square().mean().backward()
            model.finish_gradient_sync()

            # Nothing is full now. The rank's shards have the mean over all 12 examples.
            assert all(unit.is_freed for unit in model.units)
            for shard, expected in zip(model.parameter_shards, one.parameters(), strict=True):
                part = slice(shard.start, shard.start + shard.tensor.numel())
                torch.testing.assert_close(
                    shard.tensor.grad, expected.grad.flatten()[part], rtol=1e-9, atol=0
                )

            # The optimizer updates the shards. Put together again, they are what one process has.
            optimizer_of_one.step()
            optimizer.step()
            with model.gathered() as full:
                for parameter, expected in zip(full.parameters(), one.parameters(), strict=True):
                    torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=0)

        # While the second layer computed, the first one was freed.
        assert full_in_forward == 3 * [(False, True)]
        return sum(parameter.numel() for parameter in model.parameters())

    # 5*7 + 7 + 7*3 + 3 = 66 numbers are trained, and every one of them is kept on one rank.
    assert run_ranks(train_on_a_rank, 3) == [22, 22, 22]
