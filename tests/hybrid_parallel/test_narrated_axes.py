"""Tell step by step whose gradients a mesh averages, and what the number of microbatches divides."""

import torch

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import Tensors, batch, gpt, those_of
from tests.hybrid_parallel.plain_experts import auxiliary_loss, with_plain_experts


def test_gradients_are_means_over_the_ranks_of_the_data_and_the_context_axis():
    def work(cluster: Cluster) -> None:
        # Ranks 0 and 1 have the first two examples, ranks 2 and 3 the others: these are the data axis.
        mesh = Mesh(cluster, ParallelSizes(data=2, context=2))
        x, y = batch(4)
        examples = slice(0, 2) if cluster.rank < 2 else slice(2, 4)

        # All ranks begin with the same weights, and each backward sees a quarter of all tokens: ranks 0 and 1
        # have different halves of each sequence. These are the context axis.
        hybrid = HybridParallel(gpt(), mesh, x[examples], torch.optim.SGD, lr=0.1)
        hybrid.backward(x[examples], y[examples])
        ours: Tensors = {name: parameter.grad for name, parameter in hybrid.named_own_parameters().items()}

        # One process sees all tokens. Its loss is the mean over them, and so is each gradient: a mean over
        # the four ranks. Over two of them it would be that of half of the tokens.
        model = gpt()
        loss_of(model(x), y).backward()
        named = dict(model.named_parameters(remove_duplicate=False))
        expected: Tensors = {name: parameter.grad for name, parameter in named.items()}
        assert_same(ours, expected, 1e-9, "gradient of all tokens")

    run_ranks(work, 4)


def test_the_auxiliary_loss_in_a_pipeline_is_the_mean_over_its_microbatches():
    moe, weight, m = MoEConfig(4, 2), 0.3, 3

    def work(cluster: Cluster) -> None:
        x, y = batch(2 * m)

        def in_a_pipeline(aux_weight: float) -> HybridParallel:
            mesh = Mesh(cluster, ParallelSizes(pipeline=2, microbatches=m))
            experts = Experts(moe, aux_weight)
            hybrid = HybridParallel(gpt(num_layers=2), mesh, x[:2], torch.optim.SGD, experts, lr=0.1)
            hybrid.backward(x, y)
            return hybrid

        # The gradient of the auxiliary loss alone: that of both losses, less that of the other one.
        hybrid = in_a_pipeline(weight)
        both, other = hybrid.named_own_parameters(), in_a_pipeline(0.0).named_own_parameters()
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

    run_ranks(work, 2)
