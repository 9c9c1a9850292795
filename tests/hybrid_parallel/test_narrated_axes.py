"""Tell step by step what a mesh averages and when, and what the number of microbatches divides."""

import torch

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.report import counted_by_axis
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import traffic_of_axes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import Entry, Traffic
from tests.hybrid_parallel.equivalence import (
    Tensors,
    auxiliary_loss,
    batch,
    counting,
    full,
    gpt,
    gradients_of,
    those_of,
    with_plain_experts,
)
from tests.on_ranks import on_ranks


@on_ranks(4)
def test_gradients_are_means_over_the_ranks_of_the_data_and_the_context_axis(cluster: Cluster):
    # Ranks 0 and 1 have the first two examples, ranks 2 and 3 the others: these are the data axis.
    mesh = Mesh(cluster, ParallelSizes(data=2, context=2))
    x, y = batch(4)
    examples = slice(0, 2) if cluster.rank < 2 else slice(2, 4)

    # All ranks begin with the same weights, and each backward sees a quarter of all tokens: ranks 0 and 1
    # have different halves of each sequence. These are the context axis.
    hybrid = put_on_mesh(gpt(), mesh, x[examples], torch.optim.SGD, lr=0.1)
    hybrid.backward(x[examples], y[examples])
    ours: Tensors = {name: parameter.grad for name, parameter in hybrid.stages.named_own_parameters().items()}

    # One process sees all tokens. Its loss is the mean over them, and so is each gradient: a mean over
    # the four ranks. Over two of them it would be that of half of the tokens.
    model = gpt()
    loss_of(model(x), y).backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    expected: Tensors = {name: parameter.grad for name, parameter in named.items()}
    assert_same(ours, expected, 1e-9, "gradient of all tokens")


@on_ranks(2)
def test_the_auxiliary_loss_in_a_pipeline_is_the_mean_over_its_microbatches(cluster: Cluster):
    moe, weight, m = MoEConfig(4, 2), 0.3, 3
    x, y = batch(2 * m)

    def in_a_pipeline(aux_weight: float) -> HybridParallel:
        mesh = Mesh(cluster, ParallelSizes(pipeline=2, microbatches=m))
        experts = Experts(moe, aux_weight)
        hybrid = put_on_mesh(gpt(num_layers=2), mesh, x[:2], torch.optim.SGD, experts, lr=0.1)
        hybrid.backward(x, y)
        return hybrid

    # The gradient of the auxiliary loss alone: that of both losses, less that of the other one.
    hybrid = in_a_pipeline(weight)
    both, other = hybrid.stages.named_own_parameters(), in_a_pipeline(0.0).stages.named_own_parameters()
    term: Tensors = {name: both[name].grad - other[name].grad for name in both}

    # In one process each microbatch has its own auxiliary loss, and their mean counts, as with the loss.
    model = with_plain_experts(gpt(num_layers=2), moe, num_ranks=1)
    model.load_state_dict(hybrid.full_state_dict())
    for part in x.chunk(m):
        model(part)
        (weight * auxiliary_loss(model) / m).backward()
    expected: Tensors = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    assert_same(term, those_of(hybrid, expected), 1e-9, "gradient of the auxiliary loss")


@on_ranks(4)
def test_int8_along_the_data_axis_rounds_each_gradient_of_divided_layers_by_at_most_a_scale(cluster: Cluster):
    # Ranks 0 and 1 divide the layers and have the first two examples, ranks 2 and 3 have the others.
    mesh, (x, y) = Mesh(cluster, ParallelSizes(data=2, tensor=2, compress="int8")), batch(4)
    replica = mesh.coordinate("data")
    hybrid = put_on_mesh(gpt(), mesh, x[:2], torch.optim.SGD, lr=0.1)
    hybrid.backward(x.chunk(2)[replica], y.chunk(2)[replica])

    # Each replica rounds its own gradient by at most half a scale, and so does the mean. No scale is
    # larger than a 127th of the largest number that a replica has.
    largest, mean = 0.0, dict[str, torch.Tensor]()
    for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        model = gpt()
        loss_of(model(part), targets).backward()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            largest = max(largest, float(parameter.grad.abs().max()))
            mean[name] = mean.get(name, 0) + parameter.grad / 2
    ours = gradients_of(hybrid)
    errors = [float((ours[name] - mean[name]).abs().max()) for name in mean]
    assert 0 < max(errors) < 1.001 * largest / 127


def test_replicas_that_train_alone_get_the_mean_of_their_parameters_after_two_steps():
    def work(cluster: Cluster, sizes: ParallelSizes) -> None:
        mesh, (x, y) = Mesh(cluster, sizes), batch(4 * sizes.microbatches)
        replica = mesh.coordinate("data")
        mine = x.chunk(2)[replica], y.chunk(2)[replica]
        hybrid = put_on_mesh(gpt(), mesh, x[:2], torch.optim.SGD, lr=0.1)
        alone = []
        for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):  # each replica, on one process
            model = gpt()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model(part), targets).backward()
                optimizer.step()
            alone.append(model.state_dict())

        for step in range(2):
            sent: dict[Entry, Traffic] = {}
            with counting(sent):
                hybrid.optimizer.zero_grad()
                hybrid.backward(*mine)
                hybrid.optimizer.step()
                hybrid.after_step()
            by_axis = counted_by_axis(sent)
            assert by_axis == traffic_of_axes(hybrid, is_clipped=False)
            assert (by_axis["data"] == Traffic()) == (step == 0)  # they train alone
        named = hybrid.stages.named_own_parameters().items()
        ours: Tensors = {name: full(hybrid, name, parameter.detach()) for name, parameter in named}
        expected: Tensors = {name: (alone[0][name] + alone[1][name]) / 2 for name in ours}
        assert_same(ours, expected, 1e-9, "parameter")

    beside = {"tensor": 2}, {"pipeline": 2, "microbatches": 2}
    every = [ParallelSizes(data=2, sync_every=2, **axes) for axes in beside]
    run_ranks(lambda cluster: [work(cluster, sizes) for sizes in every], 4)
