"""Tell, in one straight line, why experts on two ranks train as one process with all of them does.

The matrix of ranks and options stands in test_equivalence.py and test_layer.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from comm.collectives import all_reduce
from comm.functions import exchange_shards
from lab.cluster import Cluster
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_expert_parallel_equals_one_process(cluster: Cluster):
    rank, n = cluster.rank, 2

    # One process has 6 tokens of width 4, a router and four experts, here single matrices.
    torch.manual_seed(0)
    x, target = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    router = nn.Linear(4, 4, bias=False).double()
    experts = [nn.Linear(4, 4, bias=False).double() for _ in range(4)]

    # A token goes to the expert of the largest probability, and what the expert returns is multiplied by
    # that probability. Which expert is chosen has no gradient. The weight has one: so a router learns.
    weight, chosen = router(x).softmax(-1).max(-1)
    assert chosen.tolist() == [0, 3, 2, 3, 0, 3]
    y = torch.stack([weight[t] * experts[chosen[t]](x[t]) for t in range(6)])
    F.mse_loss(y, target).backward()

    # Now rank 0 has the first three tokens and experts 0 and 1, rank 1 the others. The router is on both.
    own = slice(3 * rank, 3 * rank + 3)
    own_router = nn.Linear(4, 4, bias=False).double()
    own_experts = [nn.Linear(4, 4, bias=False).double() for _ in range(2)]
    with torch.no_grad():
        own_router.weight.copy_(router.weight)
        for mine, expert in zip(own_experts, experts[2 * rank : 2 * rank + 2], strict=True):
            mine.weight.copy_(expert.weight)
    own_weight, own_chosen = own_router(x[own]).softmax(-1).max(-1)

    # A rank sorts its tokens by expert: then those for one rank stand together, and those for one expert.
    order = own_chosen.argsort(stable=True)
    assert own_chosen[order].tolist() == [[0, 2, 3], [0, 3, 3]][rank]

    # Dispatch. Rank 0 keeps one token and sends two to rank 1. Rank 1 sends one to rank 0 and keeps two.
    sent, received = [([1, 2], [1, 1]), ([1, 2], [2, 2])][rank]
    sorted_x = x[own][order].requires_grad_()
    arrived = exchange_shards(sorted_x, 0, None, sent, received)

    # Each expert computes with its tokens, whichever rank they come from. Expert 1 has none, and computes
    # too: so its weight has a gradient, of zeros, which its replicas can average.
    its_expert = [[0, 0], [2, 3, 3, 3]][rank]
    outputs = arrived.new_zeros(len(its_expert), 4)
    for number, expert in enumerate(own_experts):
        rows = torch.tensor([at for at, e in enumerate(its_expert) if e == 2 * rank + number]).long()
        outputs = outputs.index_add(0, rows, expert(arrived[rows]))

    # Combine. The same all-to-all in reverse brings the results back, in the order in which the tokens
    # have left, and each is added to the row of its own token.
    returned = exchange_shards(outputs, 0, None, received, sent)
    own_y = torch.zeros(3, 4).double().index_add(0, order, returned * own_weight[order].unsqueeze(1))
    torch.testing.assert_close(own_y, y[own], rtol=1e-9, atol=1e-12)

    # The loss of a rank is the mean over its own tokens, and the loss of all is the mean over ranks. So
    # the router's gradient is averaged, as all gradients are in data parallelism.
    F.mse_loss(own_y, target[own]).backward()
    all_reduce(own_router.weight.grad, op="mean")
    torch.testing.assert_close(own_router.weight.grad, router.weight.grad, rtol=1e-9, atol=1e-12)

    # The backward of both all-to-alls has brought the gradients of *all* ranks' tokens to their expert.
    # They are added up there, so nothing is sent for an expert's weight: the sum is divided by n.
    for number, expert in enumerate(own_experts):
        full = experts[2 * rank + number].weight.grad
        full = torch.zeros(4, 4).double() if full is None else full  # one process does not use expert 1
        torch.testing.assert_close(expert.weight.grad / n, full, rtol=1e-9, atol=1e-12)
