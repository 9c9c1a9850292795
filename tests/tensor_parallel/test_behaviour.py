"""Grade a column-parallel and a row-parallel layer by what they do together."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from comm.collectives import Group
from comm.functions import own_shard
from comm.wire.groups import own_group
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def pair(seed: int = 0) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(seed)
    return nn.Linear(6, 24).double(), nn.Linear(24, 4).double()


def compare(cluster: Cluster, group: Group = None, seed: int = 0) -> None:
    n, (first, second), (a, b) = dist.get_world_size(group), pair(seed), pair(seed)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed)).double()
    own_x, x = x.clone().requires_grad_(), x.requires_grad_()
    y = second(F.gelu(first(x)))
    y.square().sum().backward()
    column, row = ColumnParallelLinear(a, group), RowParallelLinear(b, group)
    hidden = column(own_x)
    assert hidden.shape[-1] == 24 // n, f"a rank has {hidden.shape[-1]} outputs, and not 24 / n = {24 // n}"
    ours = row(F.gelu(hidden))
    ours.square().sum().backward()
    what = f"on {n} ranks:" if group is None else f"in the group of ranks {seed} and {seed + 2}:"
    assert_same({"output": ours.detach()}, {"output": y.detach()}, what=what)
    expected = {
        "x": x.grad,
        "column.weight": own_shard(first.weight.grad, 0, group),
        "column.bias": own_shard(first.bias.grad, 0, group),
        "row.weight": own_shard(second.weight.grad, 1, group),
        "row.bias": second.bias.grad,
    }
    names = {
        f"{kind}.{name}": p
        for kind, m in (("column", column), ("row", row))
        for name, p in m.named_parameters()
    }
    got = {"x": own_x.grad} | {name: parameter.grad for name, parameter in names.items()}
    assert_same(got, expected, what=f"gradient {what}")


def test_two_ranks_compute_what_two_plain_layers_do():
    run_ranks(compare, 2)


def test_any_number_of_ranks_computes_what_two_plain_layers_do():
    for n in (1, 3, 4):
        run_ranks(compare, n)


def test_layers_are_divided_among_the_ranks_of_their_group_only():
    def work(cluster: Cluster) -> None:
        compare(cluster, own_group([[0, 2], [1, 3]]), cluster.rank % 2)

    run_ranks(work, 4)


def test_forward_and_backward_send_one_all_reduce_each():
    def work(cluster: Cluster) -> None:
        n, (a, b), x = cluster.world_size, pair(), torch.ones(3, 6).double().requires_grad_()
        column, row = ColumnParallelLinear(a), RowParallelLinear(b)
        for what, numel in (("forward", 3 * 4), ("backward", 3 * 6)):
            LEDGER.clear()
            if what == "forward":
                y = row(column(x))
            else:
                y.sum().backward()
            rows = LEDGER.rows().items()
            sent = sum(row.bytes_sent for entry, row in rows if entry.pattern != "header")
            formula = 2 * (n - 1) * numel * 8 // n
            assert sent <= formula, (
                f"the {what} sends {sent} bytes, and not 2(n-1)/n of {8 * numel} = {formula}"
            )

    run_ranks(work, 2)
