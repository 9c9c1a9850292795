"""Tell, in one straight line for each stage of ZeRO, why it equals one process.

One process trains a toy model on a batch of 12 examples. All ranks compute that too, to compare.
"""

import copy

import torch
from torch import Tensor, nn

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks
from zero.shards import ParameterShard
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero1_textbook import TextbookZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel
from zero.train_zero3_textbook import TextbookFullyShardedDataParallel

SGD, OPTIONS = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}


class OneProcess:
    """Holds the model of one process, the batch of 12 examples, and a rank's model and third of the batch."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.optimizer = SGD(self.model.parameters(), **OPTIONS)
        # Only rank 0 starts from the same parameters: the others have to get them from rank 0.
        self.of_a_rank = copy.deepcopy(self.model)
        for parameter in self.of_a_rank.parameters() if rank > 0 else []:
            nn.init.normal_(parameter)
        mine = slice(4 * rank, 4 * rank + 4)
        self.my_x, self.my_y = self.x[mine], self.y[mine]

    def backward(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.x) - self.y).square().mean().backward()

    def compare_gradients(self, shards: list[ParameterShard]) -> None:
        """Compare the mean over all 12 examples with the part that this rank owns of each parameter."""
        for shard, expected in zip(shards, self.model.parameters(), strict=True):
            part = slice(shard.start, shard.start + shard.tensor.numel())
            own = shard.tensor.grad.as_subclass(Tensor).flatten()
            torch.testing.assert_close(own, expected.grad.flatten()[part], rtol=1e-9, atol=0)

    def compare_parameters(self, model: nn.Module) -> None:
        for parameter, expected in zip(model.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=0)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def test_zero1_in_three_phases_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        one = OneProcess(cluster.rank)
        model = one.of_a_rank
        optimizer = TextbookZeroOptimizer(model.parameters(), SGD, **OPTIONS)
        for _ in range(3):
            one.backward()

            # The loop is that of one device. All that is sent is sent in `step`: a reduce-scatter of each
            # gradient, then this rank's update of its part, then an all-gather of each parameter.
            optimizer.zero_grad()
            mean_square(model(one.my_x), one.my_y).backward()
            optimizer.step()
            one.compare_gradients(optimizer.parameter_shards)
            one.optimizer.step()
            one.compare_parameters(model)

        return sum(state["momentum_buffer"].numel() for state in optimizer.state.values())

    # Each parameter is divided by itself: of 35, 7, 21 and 3 numbers the first ranks have one more.
    assert run_ranks(train_on_a_rank, 3) == [12 + 3 + 7 + 1, 12 + 2 + 7 + 1, 11 + 2 + 7 + 1]


def test_zero1_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        one = OneProcess(cluster.rank)
        model = one.of_a_rank
        optimizer = ZeroOptimizer(model.parameters(), SGD, **OPTIONS)
        for _ in range(3):
            one.backward()

            # The backward fills gradients; then they are reduce-scattered. Now this rank has the mean over
            # all 12 examples, of the part that it owns of each parameter. (The last layer comes first.)
            optimizer.zero_grad()
            mean_square(model(one.my_x), one.my_y).backward()
            optimizer.finish_gradient_sync()  # which step() would do, too
            one.compare_gradients(optimizer.parameter_shards[::-1])

            # The optimizer updates that part. After the all-gather every rank has all new parameters.
            one.optimizer.step()
            optimizer.step()
            one.compare_parameters(model)

        # The gain: this rank holds the momentum of its own part only.
        return sum(state["momentum_buffer"].numel() for state in optimizer.state.values())

    # 5*7 + 7 + 7*3 + 3 = 66 numbers are trained, and every one of them is updated on one rank.
    assert run_ranks(train_on_a_rank, 3) == [22, 22, 22]


@on_ranks(3)
def test_zero2_equals_one_process(cluster: Cluster):
    one = OneProcess(cluster.rank)
    model = one.of_a_rank
    optimizer = ZeroGradientOptimizer(model.parameters(), SGD, **OPTIONS)
    for _ in range(3):
        one.backward()

        # A rank computes its third in two microbatches. Each sends its gradients as soon as they are
        # there, so that neither leaves any in the model; their means add up where they are owned.
        optimizer.zero_grad()
        (x0, x1), (y0, y1) = one.my_x.chunk(2), one.my_y.chunk(2)
        (mean_square(model(x0), y0) / 2).backward()
        optimizer.finish_gradient_sync()
        assert all(parameter.grad is None for parameter in model.parameters())
        (mean_square(model(x1), y1) / 2).backward()
        optimizer.finish_gradient_sync()
        one.compare_gradients(optimizer.parameter_shards[::-1])

        # The update is stage 1's.
        one.optimizer.step()
        optimizer.step()
        one.compare_parameters(model)


def test_zero3_by_hand_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        # The two linear layers are blocks, and each is a unit. Note which of them are full when a layer
        # computes in the forward, and when its gradient arrives in the backward.
        one = OneProcess(cluster.rank)
        model = TextbookFullyShardedDataParallel(one.of_a_rank)
        first, second = model.units  # the root has no parameters
        full: list[tuple[bool, bool]] = []

        def note(*_: object) -> None:
            full.append((not first.is_freed, not second.is_freed))

        for layer in (one.of_a_rank[0], one.of_a_rank[2]):
            layer.register_forward_hook(note, prepend=True)
            layer.weight.register_post_accumulate_grad_hook(note)

        # `parameters()` yields the rank's shard of each parameter, and torch's optimizer needs nothing else.
        optimizer = SGD(model.parameters(), **OPTIONS)
        for _ in range(3):
            one.backward()
            optimizer.zero_grad()
            mean_square(model(one.my_x), one.my_y).backward()
            model.finish_gradient_sync()

            # Nothing is full now. The rank's shards have the mean over all 12 examples.
            assert first.is_freed and second.is_freed and one.of_a_rank[0].weight.isnan().all()
            one.compare_gradients(model.parameter_shards)

            # The optimizer updates the shards. Put together again, they are what one process has.
            one.optimizer.step()
            optimizer.step()
            with model.gathered() as gathered:
                one.compare_parameters(gathered)

        # There and back, one layer at a time was full.
        assert full == 3 * [(True, False), (False, True), (False, True), (True, False)]
        return sum(parameter.numel() for parameter in model.parameters())

    # 66 numbers are trained, and every one of them is kept on one rank.
    assert run_ranks(train_on_a_rank, 3) == [22, 22, 22]


def test_zero3_equals_one_process():
    def train_on_a_rank(cluster: Cluster) -> int:
        # The two linear layers are blocks: each is gathered when its forward and its backward begin, and
        # freed when they end. Note, when the second one computes, which of them are full.
        one = OneProcess(cluster.rank)
        model = FullyShardedDataParallel(one.of_a_rank)
        _, [first], [second] = model.blocks  # a block has one unit; the root has none
        full_in_forward = []
        one.of_a_rank[2].register_forward_hook(
            lambda *_: full_in_forward.append((first.is_full, second.is_full)), prepend=True
        )

        # `parameters()` yields the rank's shard of each parameter, and torch's optimizer needs nothing else.
        optimizer = SGD(model.parameters(), **OPTIONS)
        for _ in range(3):
            one.backward()
            optimizer.zero_grad()
            mean_square(model(one.my_x), one.my_y).backward()
            model.finish_gradient_sync()

            # Nothing is full now. The rank's shards have the mean over all 12 examples.
            assert all(unit.is_freed for unit in model.units)
            one.compare_gradients(model.parameter_shards)

            # The optimizer updates the shards. Put together again, they are what one process has.
            one.optimizer.step()
            optimizer.step()
            with model.gathered() as full:
                one.compare_parameters(full)

        # While the second layer computed, the first one was freed.
        assert full_in_forward == 3 * [(False, True)]
        return sum(parameter.numel() for parameter in model.parameters())

    # 66 numbers are trained, and every one of them is kept on one rank.
    assert run_ranks(train_on_a_rank, 3) == [22, 22, 22]


@on_ranks(3)
def test_zero1_in_three_phases_reduces_a_gradient_once_and_adds_one_that_comes_later(cluster: Cluster):
    one = OneProcess(cluster.rank)
    zero = TextbookZeroOptimizer(one.of_a_rank.parameters(), SGD, lr=0.1)
    one.backward()
    for _ in range(2):
        mean_square(one.of_a_rank(one.my_x), one.my_y).backward()
        zero.finish_gradient_sync()
        zero.finish_gradient_sync()  # there is nothing new to reduce
    for parameter in one.model.parameters():
        parameter.grad *= 2
    one.compare_gradients(zero.parameter_shards)
