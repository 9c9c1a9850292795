"""Test that a tensor parallel model takes one tensor as its input, and gives its gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comm.functions import copy_to_ranks, gather_from_ranks, scatter_sums, sum_over_ranks
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from tensor_parallel.layers import ColumnParallelLinear
from tensor_parallel.parallelize import parallelize
from tests.tensor_parallel.equivalence import RTOL, gathered, gpt, text


def test_the_input_must_be_one_tensor_and_may_be_passed_by_keyword():
    def work(cluster: Cluster) -> list[str]:
        x, _ = text()
        model, mlp = parallelize(gpt(num_layers=1)), parallelize(MLP([4, 8, 4]))
        assert torch.equal(model(tokens_bt=x), model(x))
        assert torch.equal(mlp(x=torch.ones(2, 4)), mlp(torch.ones(2, 4)))
        sentences = []
        for arguments, named in (
            ((), {"x": {"x": x}}),
            ((None,), {}),
            ((x,), {"mask": None}),
            (((x, x),), {}),
            ((), {}),
        ):
            with pytest.raises(WorkbookError) as error:
                model(*arguments, **named)
            sentences.append(
                str(error.value).removeprefix("A tensor-parallel model takes one tensor, and was given ")
            )
        return sentences

    first, second = run_ranks(work, 2)
    assert first == second == ["a dict.", "None.", "a Tensor, None.", "a tuple.", "nothing."]


def test_an_input_without_a_batch_dimension_works_as_in_nn_linear():
    def work(cluster: Cluster) -> None:
        plain, ours = nn.Linear(4, 6), ColumnParallelLinear(4, 6, gather_output=True)
        plain.load_state_dict({name: gathered(tensor, 0) for name, tensor in ours.state_dict().items()})
        x = torch.arange(4.0)
        for layer in (plain, ours):
            layer(x).square().sum().backward()
        found = {name: gathered(parameter.grad, 0) for name, parameter in ours.named_parameters()}
        assert_same(found, gradients(plain), 1e-5)

    run_ranks(work, 2)


def test_second_derivatives_are_refused():
    """A sum over ranks has no second derivative; without a refusal its terms would be missing silently."""

    def work(cluster: Cluster) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for function in (
            lambda x: copy_to_ranks(x) ** 2,
            lambda x: sum_over_ranks(x) ** 2,
            lambda x: gather_from_ranks(x, 0) ** 2,
            lambda x: scatter_sums(x, 0) ** 2,
            lambda x: ColumnParallelLinear(4, 6)(x) ** 2,
        ):
            [gradient] = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.sum().backward()

    run_ranks(work, 2)


def test_the_gradient_of_the_input_equals_one_process():
    def work(cluster: Cluster) -> None:
        plain, ours = MLP([4, 8, 4]).double(), parallelize(MLP([4, 8, 4]).double())
        found = []
        for model in (plain, ours):
            x = torch.linspace(-1, 1, 8).double().view(2, 4).requires_grad_()
            [gradient] = torch.autograd.grad(F.mse_loss(model(x), torch.ones(2, 4).double()), x)
            found.append({"x": gradient})
        assert_same(found[1], found[0], RTOL)

    run_ranks(work, 2)
