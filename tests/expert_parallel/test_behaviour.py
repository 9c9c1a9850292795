"""Grade the forward of a mixture of experts by what it does, wherever the experts lie."""

import torch

from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.full_state import full_state
from expert_parallel.train_moe import MixtureOfExperts
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPTConfig
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.expert_parallel.reference import NaiveMixture

CONFIG = GPTConfig(num_layers=1, width=8)


def compare(cluster: Cluster, top_k: int) -> None:
    n, moe, groups = cluster.world_size, MoEConfig(4, top_k), form_groups(cluster.world_size)
    ours = MixtureOfExperts(CONFIG, moe, groups, seed=0, layer=0).double()
    alone = NaiveMixture(CONFIG, moe, n).double()
    alone.load_state_dict(full_state(ours.state_dict(), groups))
    x = torch.randn(n, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    own = x[cluster.rank : cluster.rank + 1].clone().requires_grad_()
    full = x.requires_grad_()
    expected, y = alone(full), ours(own)
    what = f"4 experts on {n} ranks, {top_k} for a token:"
    assert_same({"output": y.detach()}, {"output": expected.detach()[cluster.rank][None]}, what=what)
    expected.square().sum().backward()
    y.square().sum().backward()
    assert_same({"x": own.grad}, {"x": full.grad[cluster.rank][None]}, what=f"gradient, {what}")
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    got = {name: p.grad for name, p in ours.named_parameters() if name.startswith("experts.")}
    assert_same(got, {name: gradients[name] for name in got}, what=f"gradient, {what}")


def test_two_ranks_compute_what_one_process_does():
    run_ranks(compare, 2, 1)


def test_a_token_may_pass_several_experts_of_any_ranks():
    for n, top_k in ((1, 2), (2, 3), (4, 2)):
        run_ranks(compare, n, top_k)


def test_a_token_travels_only_to_its_experts():
    def work(cluster: Cluster) -> None:
        n, moe = cluster.world_size, MoEConfig(4, 1)
        ours = MixtureOfExperts(CONFIG, moe, form_groups(n), seed=0, layer=0).double()
        x = torch.randn(1, 60, 8, generator=torch.Generator().manual_seed(cluster.rank)).double()
        ours(x)  # the first call may do more
        LEDGER.clear()
        ours(x)
        sent = LEDGER.total().bytes_sent / x.nbytes
        # Its own tokens there and those of others back: of n equal shares n-1 are of other ranks.
        assert sent < 2, f"a rank sends {sent:.2f} times the bytes of its tokens, and not less than 2"

    run_ranks(work, 2)
