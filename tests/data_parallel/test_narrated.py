"""Tell, in one straight line for each technique, why data parallel training equals one process.

The matrix of models, ranks and microbatches stands in tests/test_wrappers.py.
"""

import torch
from torch import Tensor, nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_naive_grad_accumulation import accumulate
from data_parallel.train_overlap import OverlapDataParallel
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.models.text import microbatches
from lab.trace.ledger import LEDGER
from tests.on_ranks import on_ranks


def toy(cluster: Cluster) -> tuple[nn.Sequential, Tensor, Tensor, nn.Sequential, Tensor, Tensor]:
    """Return what one process has, a model and 6 examples, and what a rank has of it: two of the examples.

    Each rank draws other weights; the wrappers replace them by rank 0's.
    """
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 1).double()
    torch.manual_seed(cluster.rank)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return alone, x, y, module, x.chunk(3)[cluster.rank], y.chunk(3)[cluster.rank]


def assert_equal_gradients(module: nn.Module, alone: nn.Module) -> None:
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-12)


@on_ranks(3)
def test_naive_equals_one_process(cluster: Cluster):
    # One process trains a toy model on the global batch of 6 examples.
    alone, x, y, module, own_x, own_y = toy(cluster)
    nn.functional.mse_loss(alone(x), y).backward()

    # Each rank has drawn other weights; the wrapper replaces them by rank 0's.
    model = NaiveDataParallel(module)
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, expected)

    # A rank sees two of the six examples, so its own gradient is a different one.
    nn.functional.mse_loss(model(own_x), own_y).backward()
    assert not torch.allclose(module[0].weight.grad, alone[0].weight.grad)

    # The slices are equal, so the mean of the ranks' mean losses is the mean over the batch, and the mean
    # of their gradients is its gradient. The sum would be three times too large.
    model.finish_gradient_sync()
    assert_equal_gradients(module, alone)

    # All ranks hold the same gradients, so they take the same step and stay replicas.
    for replica in (module, alone):
        torch.optim.SGD(replica.parameters(), lr=0.1).step()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_accumulation_equals_one_process(cluster: Cluster):
    # One process trains a toy model on the global batch of 12 examples of 3 classes, at once.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    nn.functional.cross_entropy(alone(x), y).backward()

    # Two ranks have 6 examples each, and take them as 3 microbatches of 2.
    torch.manual_seed(cluster.rank)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = NaiveDataParallel(module)
    own_x, own_y = x.chunk(2)[cluster.rank], y.chunk(2)[cluster.rank]

    # Autograd adds the gradients up. Each sum of losses is divided by 6, so they add up to the mean.
    before = LEDGER.total()
    loss = accumulate(model, microbatches(own_x, own_y, 3), num_targets=6)
    own_loss = nn.functional.cross_entropy(module(own_x), own_y)
    torch.testing.assert_close(loss.double(), own_loss.detach(), rtol=1e-6, atol=0)
    assert LEDGER.total() == before and not loss.requires_grad  # nothing has been sent

    # One synchronisation for all microbatches: the mean over ranks of the means over microbatches.
    model.finish_gradient_sync()
    assert_equal_gradients(module, alone)


def test_microbatches_count_by_their_numbers_of_valid_targets():
    # Of three microbatches the first has 1 valid target, the second 2 and the third 3; -100 is not valid.
    torch.manual_seed(0)
    model, alone = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    alone.load_state_dict(model.state_dict())
    x, y = torch.randn(9, 4).double(), torch.tensor([0, -100, -100, 1, 2, -100, 2, 0, 1])

    # The mean is that over the 6 valid targets, or over as many as the caller says, such as 4.
    for given in (None, 4):
        loss = accumulate(model, microbatches(x, y, 3), given)
        expected = nn.functional.cross_entropy(alone(x), y, reduction="sum") / (given or 6)
        expected.backward()
        assert_same(gradients(model), gradients(alone), what=f"gradient with num_targets = {given},")
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
        model.zero_grad()
        alone.zero_grad()


@on_ranks(3)
def test_overlap_equals_one_process(cluster: Cluster):
    # One process trains on all 6 examples, and three ranks on two each.
    alone, x, y, module, own_x, own_y = toy(cluster)
    nn.functional.mse_loss(alone(x), y).backward()
    model = OverlapDataParallel(module)

    # Hooks start an all-reduce for each gradient while the backward runs. The last layer's is complete
    # before the first layer's is computed; this hook on the first layer's output lies between the two.
    in_flight = []
    hidden = module[0](own_x)
    hidden.register_hook(lambda gradient: in_flight.append(len(model.in_flight)))
    nn.functional.mse_loss(module[2](module[1](hidden)), own_y).backward()
    assert in_flight == [2]  # the last layer's weight and bias

    # The four gradients have been launched; we wait for them, and each is the mean over ranks.
    assert len(model.in_flight) == 4
    model.finish_gradient_sync()
    assert not model.in_flight
    assert_equal_gradients(module, alone)


@on_ranks(3)
def test_bucket_overlap_equals_one_process(cluster: Cluster):
    # One process trains on all 6 examples, and three ranks on two each. A bucket is full at 40 bytes.
    alone, x, y, module, own_x, own_y = toy(cluster)
    model = BucketDataParallel(module, bucket_mb=40 / (1 << 20))

    # Three buckets: the last layer, 1 + 5 numbers; the first layer's bias, 5; and its weight, 20.
    assert [bucket.flat.numel() for bucket in model.buckets] == [6, 5, 20]

    # Two steps: in the second one, gradients are views of the buckets from the beginning.
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in (module, alone)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(alone(x), y).backward()

        # Each rank computes the gradients of its two examples. A bucket leaves when its last gradient is
        # complete: here the first, the moment before the first layer's gradients are computed.
        launched = []
        hidden = module[0](own_x)
        hidden.register_hook(lambda gradient: launched.append(len(model.in_flight)))
        nn.functional.mse_loss(module[2](module[1](hidden)), own_y).backward()
        assert launched == [1]

        # After the wait each gradient is a view of its bucket, and the mean over ranks stands in it.
        model.finish_gradient_sync()
        for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-12)
            assert any(ours.grad is view for bucket in model.buckets for view in bucket.views.values())
        for optimizer in optimizers:
            optimizer.step()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
