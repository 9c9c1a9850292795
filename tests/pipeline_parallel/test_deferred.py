"""Weight gradients that are computed later equal autograd's, and free their tensors when they are done."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.trace.device_clock import Later
from pipeline_parallel.deferred import Deferring, compute_gradients
from tests.on_ranks import on_ranks
from tests.pipeline_parallel.equivalence import cnn, gpt, images, mlp, only, text, vectors


def compare(module: nn.Module, x: Tensor, recompute: bool = False, tolerance: float = 1e-12) -> None:
    """Compare two backwards, of which each adds to the gradients, against autograd's own."""
    found = []
    for is_deferred in (False, True):
        module.zero_grad()
        given = x.detach().clone().requires_grad_(x.requires_grad)
        for _ in range(2):
            later: Later = []

            def forward(x: Tensor, later: Later = later, is_deferred: bool = is_deferred) -> Tensor:
                with Deferring(later) if is_deferred else nullcontext():
                    return (
                        module(x).float().square().sum()
                        if x.dtype == torch.float32
                        else module(x).sin().sum()
                    )

            y = checkpoint(forward, given, use_reentrant=False) if recompute else forward(given)
            if y.requires_grad:
                y.backward()
            sent = None if given.grad is None else given.grad.clone()  # before the weights have their turn
            compute_gradients(later)
            assert not later
        found.append(gradients(module) | {"input": sent})
    assert_same(found[1], found[0], tolerance, f"gradient, {module},")


def some(*shape: int, wants: bool = True) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double().requires_grad_(wants)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([(), ("weight",), ("bias",), ("weight", "bias")]),
    st.booleans(),
)
def test_a_linear_layers_gradients_are_autograds_for_any_number_of_dimensions(shape, bias, names, wants):
    module = nn.Linear(4, 3, bias=bias).double()
    for name in names:
        if bias or name == "weight":
            module.get_parameter(name).requires_grad_(False)
    compare(module, some(*shape, 4, wants=wants))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_with_other_functions_between_them_and_one_used_twice(recompute: bool):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.other = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(F.gelu(self.layer(x)))
            return self.layer(x) * self.other(x).sigmoid()

    compare(Twice().double(), some(3, 4), recompute)
    for model, (x, _) in ((gpt(num_layers=1), text(2)), (mlp(3), vectors(2)), (cnn(), images(2))):
        compare(model, x, recompute)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(mlp(3).float(), vectors(3)[0].float().requires_grad_(), recompute, tolerance=2e-2)


class Forward(nn.Module):
    """Computes with two linear layers as `how` says."""

    def __init__(self, how: Callable[[nn.Linear, nn.Linear, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.first, self.second, x)


def force(create_graph: bool) -> Callable[[nn.Linear, nn.Linear, Tensor], Tensor]:
    """Return a forward that adds the gradient of an energy, which may be trained, too."""

    def forward(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        energy = second(first(x).tanh()).tanh().sum()
        return first(x) + torch.autograd.grad(energy, x, create_graph=create_graph, retain_graph=True)[0]

    return forward


def by_vmap(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.linear(row, second.weight))(first(x).unsqueeze(1)).squeeze(1)


def by_jacobian(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: second(row).tanh()))(first(x)).sum(1)


FORWARDS = {
    "the input stands where the weight does": lambda first, second, x: F.linear(second(x.t()), x),
    "the weight is a view": lambda first, second, x: F.linear(second(x), first.weight.t().view(4, 4).t()),
    "the weight is its own input": lambda first, second, x: second(x) @ F.linear(first.weight, first.weight),
    "the weight has one dimension": lambda first, second, x: F.linear(second(x), first.bias),
    "the input has one dimension": lambda first, second, x: torch.stack([first(row) for row in second(x)]),
    "the bias is one number": lambda first, second, x: F.linear(x, first.weight, second.bias[:1]),
    "the bias has two dimensions": lambda first, second, x: F.linear(x, first.weight, second.weight),
    "arguments have names": lambda first, second, x: F.linear(x, weight=first.weight, bias=second.bias),
    "what follows works in place": lambda first, second, x: second(first(x.view(2, 2, 4)).relu_()).relu_(),
    "vmap": by_vmap,
    "a Jacobian": by_jacobian,
    "a force": force(create_graph=False),
    "a trained force": force(create_graph=True),
}


@pytest.mark.parametrize("how", FORWARDS.values(), ids=FORWARDS)
def test_in_every_use_of_a_linear_layer_gradients_are_autograds(how):
    compare(Forward(how, torch.float64), some(4, 4))


def test_a_complex_layers_gradients_are_autograds():
    compare(Forward(lambda first, second, x: second(first(x * 1j)).abs(), torch.complex128), some(3, 4))


def test_a_hook_of_a_parameter_sees_the_sum_of_a_backward_as_without_split_backwards():
    module, calls = Forward(lambda first, second, x: first(first(x).tanh()), torch.float64), []
    module.first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    def halve(parameter: Tensor) -> None:
        calls.append(parameter.grad.mul_(0.5))

    module.first.bias.register_post_accumulate_grad_hook(halve)
    compare(module, some(3, 4))
    assert len(calls) == 4  # two backwards of autograd alone, and two of split layers


@on_ranks(1)
def test_a_layer_is_split_beside_the_hooks_of_a_wrapper_which_reads_the_sums_at_the_end(cluster: Cluster):
    model, later = BucketDataParallel(mlp(2)), []
    model.require_backward_grad_sync = False
    with Deferring(later):
        model.module(vectors(2)[0]).sum().backward()
    assert len(later) == 2


def test_only_weights_wait_and_norms_and_embeddings_have_their_gradients_at_once():
    model, reference = gpt(num_layers=1, tied=False), gpt(num_layers=1, tied=False)
    later: Later = []
    x, _ = text(2)
    with Deferring(later):
        y = model(x).square().mean()
    y.backward()
    at_once = {name for name, gradient in gradients(model).items() if gradient is not None}
    assert at_once == {n for n, _ in model.named_parameters() if "norm" in n or "embedding" in n}
    reference(x).square().mean().backward()
    assert_same(only(gradients(model), at_once), only(gradients(reference), at_once), 1e-12)
    assert len(later) == 7  # q, k, v, o, up, down and the head


def test_what_is_frozen_keeps_nothing_for_later():
    x = torch.ones(2, 4, requires_grad=True)
    for module in (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)):
        later: Later = []
        with Deferring(later):
            y = module.requires_grad_(False)(x)
        y.sum().backward()
        assert not later


def test_a_weight_gradient_has_the_strides_of_its_weight_which_fused_optimizers_count_on():
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.randn(4, 3).t())
    later: Later = []
    with Deferring(later):
        module(torch.randn(2, 4)).sum().backward()
    compute_gradients(later)
    assert module.weight.grad.stride() == module.weight.stride()
