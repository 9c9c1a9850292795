"""Wrappers of several axes around one model train as one process: each answers for its own axis."""

import torch
from torch import nn

from comm.wire.groups import own_group
from context_parallel.parallel_model import ContextParallel
from context_parallel.train_ring_attention import ring_attention
from expert_parallel.config import ExpertGroups, MoEConfig
from expert_parallel.train_moe import ExpertParallel
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from tensor_parallel.parallelize import parallelize
from tests.context_parallel.equivalence import gpt, text
from tests.on_ranks import on_ranks

LINES, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by the plain model's names: a step of SGD moves each parameter by them."""
    before = model.full_state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad.as_subclass(torch.Tensor)
    after = model.full_state_dict()
    return {name: before[name] - after[name] for name in before}


@on_ranks(4)
def test_tokens_are_cut_around_divided_layers(cluster: Cluster):
    x, y = text(16)
    plain = gpt(0, num_layers=1)
    loss_of(plain(x), y).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    ours = parallelize(gpt(0, num_layers=1), own_group(LINES))
    ours = ContextParallel(ours, ring_attention, group=own_group(COLUMNS))
    ours.loss(ours(x), y).backward()
    ours.finish_gradient_sync()
    assert_same({"norm": ours.clip_grad_norm_(0.1)}, {"norm": norm})
    expected = {name: plain.get_parameter(name).grad for name in plain.state_dict()}
    assert_same(full_gradients(ours), expected, what="gradient")
    ours.load_full_state_dict(plain.state_dict())
    assert_same(ours.full_state_dict(), plain.state_dict(), 0, "entry")


@on_ranks(4)
def test_layers_are_divided_around_experts(cluster: Cluster):
    x, y = text(16)
    everyone, alone = own_group(COLUMNS), own_group([[rank] for rank in range(4)])
    moe, own = MoEConfig(4, 2), slice(cluster.rank // 2, cluster.rank // 2 + 1)
    plain = ExpertParallel(gpt(0, num_layers=1), moe, ExpertGroups(alone, alone, alone))
    loss_of(plain(x), y).backward()
    plain.finish_gradient_sync()
    norm = plain.clip_grad_norm_(0.1)
    ours = ExpertParallel(gpt(0, num_layers=1), moe, ExpertGroups(everyone, everyone, alone))
    ours = parallelize(ours, own_group(LINES))
    ours.loss(ours(x[own]), y[own]).backward()
    ours.finish_gradient_sync()
    assert_same({"norm": ours.clip_grad_norm_(0.1)}, {"norm": norm})
    assert_same(full_gradients(ours), full_gradients(plain), what="gradient")
