"""Test one layer with tokens whose experts are given: whichever ranks they lie on, one process agrees."""

import torch
from torch import Tensor

from comm.collectives import all_reduce
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.full_state import full_state
from expert_parallel.train_moe import MixtureOfExperts
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPTConfig
from lab.trace.ledger import LEDGER
from tests.expert_parallel.equivalence import gradients_or_zeros
from tests.expert_parallel.reference import NaiveMixture
from tests.on_ranks import on_ranks

CONFIG = GPTConfig(num_layers=1, width=8)


def tokens_for(choices_tk: Tensor, num_experts: int) -> Tensor:
    """Return tokens that choose these experts of a router whose weight is the identity."""
    x_td = 0.1 * torch.randn(len(choices_tk), CONFIG.width, generator=torch.Generator().manual_seed(1))
    for j, experts_t in enumerate(choices_tk.T):
        x_td[torch.arange(len(x_td)), experts_t] += 3 - j
    assert (choices_tk < num_experts).all()
    return x_td.double()


def compare_layer(cluster: Cluster, choices: list[list[int]], num_experts: int = 4, **changes) -> None:
    """Compare outputs and all gradients, where token t chooses the experts `choices[t]`."""
    n, choices_tk = cluster.world_size, torch.tensor(choices)
    moe = MoEConfig(num_experts, choices_tk.shape[1], **changes)
    groups = form_groups(n)
    ours = MixtureOfExperts(CONFIG, moe, groups, seed=0, layer=0).double()
    naive = NaiveMixture(CONFIG, moe, n).double()
    with torch.no_grad():
        ours.router.weight.copy_(torch.eye(num_experts, CONFIG.width))
    naive.load_state_dict(full_state(ours.state_dict(), groups))

    x_td = tokens_for(choices_tk, num_experts)
    mine = slice(cluster.rank * len(x_td) // n, (cluster.rank + 1) * len(x_td) // n)
    x, own_x = x_td.clone().requires_grad_(), x_td[mine].clone().requires_grad_()
    expected_y, y = naive(x.unsqueeze(0)).squeeze(0), ours(own_x)
    (expected_y.square().sum()).backward()
    (y.square().sum()).backward()
    for name, parameter in ours.named_parameters():
        if not name.startswith("experts."):
            all_reduce(parameter.grad)

    what = f"{choices}, {changes}"
    assert_same({"y": y.detach()}, {"y": expected_y[mine].detach()}, what=f"output, {what},")
    assert_same({"x": own_x.grad}, {"x": x.grad[mine]}, what=f"gradient, {what},")
    actual = full_state(gradients_or_zeros(ours), groups)
    assert_same(actual, gradients_or_zeros(naive), what=f"gradient, {what},")


@on_ranks(2, 1, 4)
def test_tokens_reach_their_experts_and_come_home_in_order(cluster: Cluster):
    for choices in (
        [[0, 3], [3, 0], [1, 2], [2, 1], [0, 1], [3, 2], [2, 0], [1, 3]],
        [[2, 0], [2, 3], [2, 1], [2, 0], [2, 3], [2, 1], [2, 0], [2, 3]],
    ):
        compare_layer(cluster, choices)


@on_ranks(2)
def test_a_rank_sends_nothing_to_others(cluster: Cluster):
    compare_layer(cluster, [[0, 1], [1, 0], [0, 1], [1, 0], [2, 3], [3, 2], [2, 3], [3, 2]])  # nor gets
    compare_layer(cluster, [[0], [1], [1], [0], [0], [1], [0], [1]])  # rank 1 gets nothing at all
    compare_layer(cluster, [[2], [3], [3], [2], [0], [1], [0], [1]])  # all tokens change places


@on_ranks(4)
def test_all_tokens_choose_one_expert(cluster: Cluster):
    compare_layer(cluster, [[3]] * 8)
    compare_layer(cluster, [[3]] * 8, capacity=1.0)
    compare_layer(cluster, [[3, 1]] * 8, capacity=0.01, shared=True)


@on_ranks(2)
def test_the_first_tokens_are_kept_where_the_capacity_ends(cluster: Cluster):
    layer = MixtureOfExperts(CONFIG, MoEConfig(4, 1, 1.0), form_groups(2), seed=0, layer=0).double()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, CONFIG.width))
    y = layer(tokens_for(torch.tensor([[2], [2], [0], [2], [2], [0], [0], [2]]), 4))
    # A rank has 8 tokens for 4 experts, so an expert takes 2 of them.
    kept = [True, True, True, False, False, True, False, False]
    assert (y != 0).any(1).tolist() == kept
    assert layer.sent_rE.tolist() == [[2, 0, 2, 0]] * 2
    layer.eval()
    layer(torch.zeros(1 + cluster.rank, CONFIG.width).double())  # an evaluation changes no count
    assert layer.sent_rE.tolist() == [[2, 0, 2, 0]] * 2


@on_ranks(2)
def test_a_token_travels_only_to_its_experts(cluster: Cluster):
    n, moe = cluster.world_size, MoEConfig(4, 1)
    ours = MixtureOfExperts(CONFIG, moe, form_groups(n), seed=0, layer=0).double()
    x = torch.randn(1, 60, 8, generator=torch.Generator().manual_seed(cluster.rank)).double()
    ours(x)  # the first call may do more
    LEDGER.clear()
    ours(x)
    sent = LEDGER.total().bytes_sent / x.nbytes
    # Its own tokens there and those of others back: of n equal shares n-1 are of other ranks.
    assert sent < 2, f"a rank sends {sent:.2f} times the bytes of its tokens, and not less than 2"
