"""Test the layers alone: the ranks' shards are one layer's weight, and the outputs are that layer's."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from comm.functions import own_shard, summed
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.models.model import seeded
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from tensor_parallel import layers
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tensor_parallel.parallelize import parallelize
from tests.on_ranks import on_ranks
from tests.tensor_parallel.equivalence import gathered, gpt


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).double()


def plain_linear(inputs: int, outputs: int, seed: int, bias: bool = True) -> nn.Linear:
    with seeded(seed):
        return nn.Linear(inputs, outputs, bias).double()


def plain_embedding() -> nn.Embedding:
    with seeded(3):
        return nn.Embedding(61, 6).double()


def compare_pair(cluster: Cluster, by_tokens: bool = False, **options: bool) -> None:
    """Compare the output and all gradients of a column and a row layer with those of two plain layers."""
    first, second = plain_linear(6, 24, seed=1), plain_linear(24, 5, seed=2)
    x, weight = numbers(2, 12, 6).requires_grad_(), numbers(2, 12, 5)
    y = second(F.gelu(first(x)))
    (y * weight).sum().backward()
    expected = {"y": y.detach(), "x": x.grad, "row.bias": second.bias.grad}
    expected |= {"column.weight": first.weight.grad, "column.bias": first.bias.grad}
    expected |= {"row.weight": second.weight.grad}
    divided = {"sequence_parallel": True} if by_tokens else {}
    column = ColumnParallelLinear(plain_linear(6, 24, seed=1), **divided, **options)
    row = RowParallelLinear(plain_linear(24, 5, seed=2), **divided)
    mine = [own_shard(t.detach(), 1, None).clone() if by_tokens else t.detach() for t in (x, weight)]
    part, n = mine[0].requires_grad_(), cluster.world_size
    hidden = column(part)
    assert hidden.shape[-1] == 24 // n, f"a rank has {hidden.shape[-1]} outputs, and not 24 / n = {24 // n}"
    ours = row(F.gelu(hidden))
    (ours * mine[1]).sum().backward()
    actual = {"y": ours.detach(), "x": part.grad, "row.bias": row.bias.grad}
    if by_tokens:
        actual = {name: gathered(actual[name], 1) for name in ("y", "x")}
        actual["row.bias"] = summed(row.bias.grad, None)
    actual |= {"column.weight": gathered(column.weight.grad, 0)}
    actual |= {"column.bias": gathered(column.bias.grad, 0)}
    actual |= {"row.weight": gathered(row.weight.grad, 1)}
    assert_same(actual, expected, what=f"output or gradient on {n} ranks:")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_column_and_a_row_layer_equal_two_plain_layers(n: int):
    run_ranks(compare_pair, n)


@pytest.mark.parametrize("n", [1, 2, 3])
@on_ranks("n")
def test_with_divided_tokens_and_without_overlap_layers_equal_plain_ones(cluster: Cluster, n: int):
    for by_tokens, overlap in ((True, True), (True, False), (False, False)):
        compare_pair(cluster, by_tokens, overlap=overlap)


@on_ranks(2)
def test_the_bias_of_a_row_layer_is_added_once(cluster: Cluster):
    layer = RowParallelLinear(plain_linear(4, 3, seed=0))
    layer.bias.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    y = layer(torch.zeros(5, 2).double())
    y.sum().backward()
    assert_same({"y": y.detach()}, {"y": torch.tensor([[1.0, 2.0, 3.0]]).expand(5, 3)}, what="output")
    assert_same({"bias": layer.bias.grad}, {"bias": torch.full((3,), 5.0)})

    for by_tokens in (False, True):  # a layer may have no bias
        without = RowParallelLinear(plain_linear(4, 3, 0, bias=False), sequence_parallel=by_tokens)
        assert not without(torch.zeros(1, 6, 2).double()).any()


@pytest.mark.parametrize("n", [2, 3])
@on_ranks("n")
def test_an_embedding_finds_each_token_on_the_rank_that_owns_it(cluster: Cluster, n: int):
    plain = plain_embedding()
    tokens = torch.cat([torch.arange(61), torch.tensor([0, 60, 60])]).view(2, 32)[:, :24]
    weight = numbers(2, 24, 6)
    y = plain(tokens)
    (y * weight).sum().backward()
    for by_tokens in (False, True):
        ours = VocabParallelEmbedding(plain_embedding(), sequence_parallel=by_tokens)
        padded = gathered(ours.weight, 0)
        assert len(padded) == -(-61 // n) * n and not padded[61:].any()
        found = ours(tokens)
        (found * (own_shard(weight, 1, None) if by_tokens else weight)).sum().backward()
        actual = {
            "y": gathered(found, 1) if by_tokens else found.detach(),
            "weight": gathered(ours.weight.grad, 0)[:61],
        }
        assert_same(actual, {"y": y.detach(), "weight": plain.weight.grad})


@pytest.mark.parametrize("kinds", [2, 3])
@on_ranks(4)
def test_layers_communicate_within_the_given_group_only(cluster: Cluster, kinds: int):
    """Two kinds are a column and a row layer; three begin with an embedding, also with divided tokens."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][cluster.rank % 2]
    tokens = torch.arange(12).view(2, 6) + cluster.rank % 2  # each group has its own
    for divided in ({}, {"sequence_parallel": True})[: kinds - 1]:
        plain, cut = (
            [plain_embedding(), plain_linear(6, 24, seed=1), plain_linear(24, 5, seed=2)] for _ in "12"
        )
        parallel = VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear
        ours = [kind(cut[i], group, **divided) for i, kind in enumerate(parallel) if i >= 3 - kinds]
        found = []
        for embedding, column, row in (plain, [*plain[: 3 - kinds], *ours]):
            h = embedding(tokens)
            h.retain_grad()
            y = row(F.gelu(column(h)))
            y.square().sum().backward()
            found.append({"output": y.detach(), "gradient": h.grad})
        expected, actual = found
        if divided:
            expected = {name: own_shard(full, 1, group) for name, full in expected.items()}
        assert_same(actual, expected, what="value within a group:")


@on_ranks(2)
def test_a_token_outside_of_the_vocabulary_is_refused_on_all_ranks(cluster: Cluster):
    """nn.Embedding does the same. Row 61 is padding on the last rank."""
    for by_tokens in (False, True):
        embedding = VocabParallelEmbedding(plain_embedding(), sequence_parallel=by_tokens)
        model = parallelize(gpt(num_layers=1), None, by_tokens)
        for token in (-1, 61, 62, 999):
            for module in (embedding, model):
                with pytest.raises(IndexError, match="out of range"):
                    module(torch.tensor([[3, 60, token, 0]]))
        embedding(torch.tensor([[0, 60]]))


@on_ranks(1)
def test_under_autocast_layers_compute_and_send_what_plain_ones_do_bit_by_bit(cluster: Cluster):
    for by_tokens, make in itertools.product((False, True), (ColumnParallelLinear, RowParallelLinear)):
        linears = [plain_linear(6, 12, seed=0).float() for _ in range(2)]
        found = []
        for module in (make(linears[0], sequence_parallel=by_tokens), linears[1]):
            x = numbers(2, 4, 6).float().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = module(x)
            assert y.dtype == torch.bfloat16
            (y.float() * torch.linspace(0, 1, 12)).sum().backward()
            found.append(gradients(module) | {"input": x.grad})
        assert_same(found[0], found[1], 0, f"gradient, {make.__name__},")


class Products(TorchDispatchMode):
    """This mode appends each matrix product to `events`."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


def test_the_inputs_gradient_is_sent_while_the_weights_gradient_is_computed():
    def look(cluster: Cluster, name: str, by_tokens: bool) -> list[str]:
        events: list[str] = []
        original = getattr(layers, name)

        class Watched:
            def __init__(self, *args, **options) -> None:
                events.append("launched")
                assert by_tokens or options["async_op"]
                self._work = original(*args, **options)

            def wait(self):
                events.append("awaited")
                return self._work.wait()

        layer = ColumnParallelLinear(nn.Linear(6, 12), sequence_parallel=by_tokens)
        y = layer(torch.ones(2, 4, 6, requires_grad=True))
        with mock.patch.object(layers, name, Watched), Products(events):
            y.sum().backward()
        return events

    for name, by_tokens in (("all_reduce", False), ("InFlightReduceScatter", True)):
        for events in run_ranks(look, 2, name, by_tokens):
            assert events == ["product", "launched", "product", "awaited"], name


@on_ranks(2)
def test_without_overlap_a_backward_reduces_the_inputs_gradient_once_for_several_layers(cluster: Cluster):
    for overlap, by_tokens in itertools.product((True, False), (False, True)):
        options = {"sequence_parallel": by_tokens, "overlap": overlap}
        shared = [ColumnParallelLinear(nn.Linear(6, 12), **options) for _ in range(3)]
        ys = layers.column_parallel(torch.ones(2, 4, 6, requires_grad=True), shared)
        LEDGER.clear()
        sum(y.sum() for y in ys).backward()
        rows = {entry.op: row for entry, row in LEDGER.rows().items() if entry.pattern != "header"}
        if by_tokens:
            assert set(rows) == ({"all_gather", "reduce_scatter"} if overlap else {"reduce_scatter"})
        else:
            once = Traffic(48 * 4, messages_sent=2)  # a ring all-reduce of 48 float32 on 2 ranks
            assert rows == {"all_reduce": once}


@on_ranks(2)
def test_forward_and_backward_send_one_all_reduce_each(cluster: Cluster):
    n, x = cluster.world_size, torch.ones(3, 6).double().requires_grad_()
    column = ColumnParallelLinear(plain_linear(6, 24, seed=1))
    row = RowParallelLinear(plain_linear(24, 4, seed=2))
    for what, numel in (("forward", 3 * 4), ("backward", 3 * 6)):
        LEDGER.clear()
        if what == "forward":
            y = row(column(x))
        else:
            y.sum().backward()
        rows = LEDGER.rows().items()
        sent = sum(row.bytes_sent for entry, row in rows if entry.pattern != "header")
        formula = 2 * (n - 1) * numel * 8 // n
        assert sent <= formula, f"the {what} sends {sent} bytes, and not 2(n-1)/n of {8 * numel} = {formula}"
