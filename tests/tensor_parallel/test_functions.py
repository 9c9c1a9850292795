"""The conjugate pairs against autograd on one process, which has every rank's tensors.

On one process the ranks' inputs are leaves of one graph, and the loss is the sum of what each rank makes of
its output. Where all have the same output, they all make the same of it, and it counts once.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comm.errors import CommError
from comm.functions import (
    copy_to_ranks,
    gather,
    gather_tokens,
    own_part,
    scatter_sums,
    split,
    sum_over_ranks,
)
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.tensor_parallel import equivalence  # noqa: F401  (what the ranks import beforehand)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def leaves(n: int, *shape: int) -> list[Tensor]:
    """A tensor for each rank."""
    return [numbers(rank, *shape).requires_grad_() for rank in range(n)]


def check(actual_y: Tensor, weight: Tensor, x: Tensor, expected_y: Tensor, expected_grad: Tensor) -> None:
    """The output, and the gradient of the output times `weight`."""
    (actual_y * weight).sum().backward()
    assert_same({"y": actual_y.detach()}, {"y": expected_y.detach()}, what="output")
    assert_same({"x": x.grad}, {"x": expected_grad})


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_pair_is_what_autograd_finds_on_one_process(n: int):
    def compare(cluster: Cluster) -> None:
        me, shape = cluster.rank, (5, 12, 7)
        for dim in (0, 1, 2, -1, -2):
            whole, same = numbers(7, *shape).requires_grad_(), numbers(9, *shape)
            differ = [numbers(20 + rank, *shape) for rank in range(n)]  # what each rank makes of its output

            # f: all have x, and each makes something else of it.
            sum((whole * weight).sum() for weight in differ).backward()
            x = whole.detach().clone().requires_grad_()
            check(copy_to_ranks(x), differ[me], x, whole, whole.grad)

            # g: each has a term, and all make the same of the sum.
            terms = leaves(n, *shape)
            total = sum(terms)
            (total * same).sum().backward()
            x = terms[me].detach().clone().requires_grad_()
            check(sum_over_ranks(x), same, x, total, terms[me].grad)

            # gather, of parts that differ in size.
            parts = [part.detach().clone().requires_grad_() for part in whole.tensor_split(n, dim)]
            full = torch.cat(parts, dim)
            (full * same).sum().backward()
            x = parts[me].detach().clone().requires_grad_()
            check(gather(x, dim, size=full.shape[dim]), same, x, full, parts[me].grad)

            # split: all have x, each makes something else of its part; whole's gradient is on all.
            full = whole.detach().clone().requires_grad_()
            makes = [weight.tensor_split(n, dim) for weight in differ]
            cuts = full.tensor_split(n, dim)
            sum((cut * makes[rank][rank]).sum() for rank, cut in enumerate(cuts)).backward()
            x = whole.detach().clone().requires_grad_()
            check(split(x, dim), makes[me][me], x, cuts[me], full.grad)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tokens_are_gathered_and_their_sums_scattered_along_any_dim(n: int):
    def compare(cluster: Cluster) -> None:
        me = cluster.rank
        for dim in (0, 1, 2, -1, -2):
            shape = [3, 5, 7]
            shape[dim] = 2 * n

            # gather_tokens: each makes something else of the whole.
            differ = [numbers(20 + rank, *shape) for rank in range(n)]
            parts = [
                part.detach().clone().requires_grad_() for part in numbers(7, *shape).tensor_split(n, dim)
            ]
            full = torch.cat(parts, dim)
            sum((full * weight).sum() for weight in differ).backward()
            x = parts[me].detach().clone().requires_grad_()
            check(gather_tokens(x, dim), differ[me], x, full, parts[me].grad)

            # scatter_sums: each makes something else of its part.
            terms = leaves(n, *shape)
            cuts = sum(terms).tensor_split(n, dim)
            makes = [weight.tensor_split(n, dim)[rank] for rank, weight in enumerate(differ)]
            sum((cut * make).sum() for cut, make in zip(cuts, makes, strict=True)).backward()
            x = terms[me].detach().clone().requires_grad_()
            check(scatter_sums(x, dim), makes[me], x, cuts[me], terms[me].grad)

    run_ranks(compare, n)


def test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum():
    def look(cluster: Cluster) -> list[tuple[float, float]]:
        found = []
        for function in (sum_over_ranks, copy_to_ranks):
            x = torch.tensor(1.0 + cluster.rank, requires_grad=True)
            y = function(x)
            y.backward(torch.tensor(10.0**cluster.rank))
            found.append((y.item(), x.grad.item()))
        return found

    assert run_ranks(look, 3) == [[(6, 10.0**rank), (1.0 + rank, 111)] for rank in range(3)]


def test_inputs_outputs_and_gradients_are_left_as_they_were():
    def look(cluster: Cluster) -> None:
        functions: list[Callable[[Tensor], Tensor]] = [
            copy_to_ranks,
            sum_over_ranks,
            lambda x: gather(x, 0),
            lambda x: split(x, 0),
            lambda x: gather_tokens(x, 0),
            lambda x: scatter_sums(x, 0),
        ]
        for function in functions:
            x = numbers(cluster.rank, 4, 3).requires_grad_()
            y = function(x * 1.0)
            # A square needs its input in the backward: autograd complains if that was written to.
            z = y.square()
            grad = numbers(5, *z.shape)
            given = grad.clone()
            z.backward(grad)
            assert torch.equal(x, numbers(cluster.rank, 4, 3)) and torch.equal(grad, given)
            assert torch.equal(z, y.square())

    run_ranks(look, 2)


def test_gradients_and_inputs_may_lie_in_memory_in_any_order():
    def look(cluster: Cluster) -> None:
        x = numbers(0, 4, 6).t().requires_grad_()
        y = sum_over_ranks(copy_to_ranks(x))
        y.backward(torch.ones(()).double().expand(6, 4))
        assert_same({"y": y.detach(), "x": x.grad}, {"y": 2 * x.detach(), "x": torch.full((6, 4), 2.0)})

    run_ranks(look, 2)


def test_parts_are_as_tensor_split_cuts_them_and_others_are_refused():
    def look(cluster: Cluster) -> None:
        x = numbers(0, 7, 5)
        for dim in (0, 1, -1):
            assert torch.equal(own_part(x, dim, None), x.tensor_split(3, dim)[cluster.rank])
        with pytest.raises(CommError, match=r"has 1 of 7 along dim 0\."):
            gather(x[:1], 0, size=7)
        with pytest.raises(CommError, match="7 along dim 0 cannot be divided among 3 ranks"):
            scatter_sums(x, 0)

    run_ranks(look, 3)
