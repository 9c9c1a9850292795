"""Tell, in one straight line for each technique, what a training becomes that sends less.

The matrix of models, ranks and options stands in the other files of this folder.
"""

import pytest
import torch
from torch import Tensor, nn

from lab.cluster import Cluster
from lab.trace.ledger import LEDGER
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_diloco import StreamingDiLoCo
from low_communication.train_diloco_plain import DiLoCo
from low_communication.train_hsdp import HybridShardedDataParallel, machine_groups
from low_communication.train_local_sgd import LocalSGD
from tests.low_communication.equivalence import everyone
from tests.on_ranks import on_ranks


class Parabola(nn.Module):
    """Has one number w, which begins at 0. A rank's loss is steep/2 (w - best)^2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.steep, self.best = [(1.0, 0.0), (3.0, 4.0)][rank]

    def forward(self) -> Tensor:
        return self.steep / 2 * (self.w - self.best).square()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Take a step of this rank, and return where it has led."""
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
    return next(model.parameters()).item()


@on_ranks(2)
def test_averaging_parameters_is_averaging_gradients_for_one_step_only(cluster: Cluster):
    # Data parallelism steps with the mean of the gradients w and 3 (w - 4), which is 2 w - 6. With a
    # learning rate of 1/4 it goes from 0 to 1.5, then to 2.25, and in the end to 3, the best w for both.
    def start(sync_every: int) -> tuple[LocalSGD, torch.optim.Optimizer]:
        model = LocalSGD(Parabola(cluster.rank), sync_every)
        return model, torch.optim.SGD(model.parameters(), lr=1 / 4)

    # With H = 1 rank 0 stays at 0, its own best place, and rank 1 goes to 3. Their mean is 1.5.
    model, optimizer = start(sync_every=1)
    assert step(model, optimizer) == [0, 3][cluster.rank]
    assert model.after_step(optimizer) and model.module.w == 1.5

    # With H = 2 rank 1 takes its second step from 3, where it has a smaller gradient than at 1.5. So two
    # steps lead to 1.875, and not to 2.25.
    model, optimizer = start(sync_every=2)
    assert step(model, optimizer) == [0, 3][cluster.rank] and not model.after_step(optimizer)
    assert step(model, optimizer) == [0, 3.75][cluster.rank] and model.after_step(optimizer)
    assert model.module.w == 1.875

    # Ranks that train alone for long end at their own best places, 0 and 4. Their mean is 2, and not 3.
    model, optimizer = start(sync_every=100)
    while not model.after_step(optimizer):
        step(model, optimizer)
    assert abs(model.module.w.item() - 2) < 1e-9


@on_ranks(2)
def test_diloco_takes_the_mean_change_of_the_ranks_as_a_gradient(cluster: Cluster):
    # Two steps lead rank 0 to 0 and rank 1 to 3.75, as above. Their mean change, 1.875, becomes the first
    # momentum. With Nesterov's momentum of 0.9 and an outer rate of 0.7 the outer step is
    # 0.7 (1.875 + 0.9 * 1.875) = 2.49375, so it goes farther than the mean.
    model = DiLoCo(Parabola(cluster.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 4)
    for _ in range(2):
        step(model, optimizer)
    model.outer_step()
    assert model.module.w.item() == pytest.approx(2.49375)

    # From there two steps lead rank 0 back to 1.402734375, and rank 1 on to 3.905859375, on average by
    # 0.160546875. The momentum keeps 0.9 of the first change, 1.6875, so it is 1.848046875 now, and the
    # outer step is 0.7 (0.160546875 + 0.9 * 1.848046875) = 1.27665234375.
    for _ in range(2):
        step(model, optimizer)
    model.outer_step()
    assert model.module.w.item() == pytest.approx(2.49375 + 1.27665234375)


@on_ranks(2)
def test_with_a_delay_ranks_train_on_while_their_changes_travel(cluster: Cluster):
    # Two steps lead rank 0 to 0 and rank 1 to 3.75, and the outer step to 2.49375, as above. With a delay
    # of one step the ranks train on while their changes travel: rank 1 to 3.9375. Then each takes the new
    # anchor, and adds what it has learned since it sent: 0, and 0.1875.
    model = StreamingDiLoCo(Parabola(cluster.rank), sync_every=2, group=everyone(cluster), delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 4)
    for expected in ([0, 3], [0, 3.75], [0, 3.9375]):
        assert step(model, optimizer) == expected[cluster.rank]
        model.after_step()
    assert model.module.w.item() == pytest.approx(2.49375 + [0, 0.1875][cluster.rank])
    model.finish()


@on_ranks(2)
def test_error_feedback_sends_later_what_topk_leaves_out(cluster: Cluster):
    # A loss of w * gradient has that gradient. Of the mean, (2, 3, 2, 1), the second number is the
    # largest. But each rank has another one that is larger, and sends one number in four.
    gradient = torch.tensor([[4.0, 3.0, 0.0, 1.0], [0.0, 3.0, 4.0, 1.0]])[cluster.rank]

    def mean(model: CompressedDataParallel) -> list[float]:
        [w] = model.trained
        model.zero_grad()
        (w * gradient).sum().backward()
        model.finish_gradient_sync()
        return w.grad.tolist()

    # The first step's mean has the two fours, halved, and each rank keeps the rest.
    model = CompressedDataParallel(nn.ParameterList([torch.zeros(4)]), "topk", share=1 / 4)
    assert mean(model) == [2, 0, 2, 0]
    [bucket] = model.buckets
    assert model.remaining[bucket].tolist() == [0, 3, 0, 1]

    # In the second step that is added to the same gradients. Now the second number is 6, and is sent.
    assert mean(model) == [0, 6, 0, 0]

    # What was sent in two steps, and what remains, are the two gradients: nothing is lost.
    sent = torch.tensor([[4.0, 6.0, 0.0, 0.0], [0.0, 6.0, 4.0, 0.0]])[cluster.rank]
    assert torch.equal(sent + model.remaining[bucket], 2 * gradient)

    # Without error feedback the second number is never sent, however often its gradient comes.
    layer = nn.ParameterList([torch.zeros(4)])
    forgets = CompressedDataParallel(layer, "topk", error_feedback=False, share=1 / 4)
    assert mean(forgets) == mean(forgets) == [2, 0, 2, 0]


@on_ranks(4)
def test_hsdp_keeps_parameters_within_a_machine_and_averages_gradients_over_all(cluster: Cluster):
    # One process trains a weight of 4 x 4 on four examples. Four ranks on two machines have one each.
    weight = torch.arange(16.0).view(4, 4)
    x = torch.diag(torch.arange(1.0, 5.0))
    alone, module = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    alone.weight.data, module.weight.data = weight.clone(), weight.clone()
    alone(x).square().mean().backward()

    # The two ranks of a machine divide the weight, and each has a peer on the other machine.
    model = HybridShardedDataParallel(module, *machine_groups(cluster, shard_size=2))
    [shard] = model.parameters()
    half = slice(8 * (cluster.rank % 2), 8 * (cluster.rank % 2) + 8)
    assert torch.equal(shard.detach().flatten(), weight.flatten()[half])

    # A rank's shard gets the mean over all four examples, though it has seen only its own.
    LEDGER.clear()
    model(x[cluster.rank : cluster.rank + 1]).square().mean().backward()
    model.finish_gradient_sync()
    assert torch.equal(shard.grad.flatten(), alone.weight.grad.flatten()[half])

    # Only the all-reduce of half a gradient, 8 numbers of 4 bytes, has left the machine.
    left = {row.axis: sent.bytes_sent for row, sent in LEDGER.rows().items() if row.pattern == "ring"}
    assert left["replicas"] == 8 * 4
