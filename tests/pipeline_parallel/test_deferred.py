"""Weight gradients that are computed later equal autograd's, and free their tensors when they are done."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lab.check import assert_same, gradients
from lab.trace.memory import live_bytes
from pipeline_parallel.deferred import DeferredGradients, deferring
from pipeline_parallel.stage import Stage, parts_of
from pipeline_parallel.stage_runner import AutogradRunner
from tests.pipeline_parallel.equivalence import cnn, gpt, images, mlp, only, text, vectors


def compare(module: nn.Module, x: Tensor, backwards: int = 2, recompute: bool = False) -> None:
    """Compare several backwards, of which each adds to the gradients, against autograd's own."""
    x = x.double()
    module.double()
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)]
    dy = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(7)).double()
    for _ in range(backwards):
        y = module(inputs[0])
        if y.requires_grad:
            y.backward(dy)
    expected = gradients(module) | {"input": inputs[0].grad}
    module.zero_grad()
    for _ in range(backwards):
        deferred = DeferredGradients()

        def forward(x: Tensor) -> Tensor:
            with deferring(deferred):
                return module(x)

        y = checkpoint(forward, inputs[1], use_reentrant=False) if recompute else forward(inputs[1])
        before = weights_of(module)
        if y.requires_grad:
            y.backward(dy)
        assert_same(weights_of(module), before, 0, "gradient before its time")
        deferred.run()
        assert not deferred.waiting and not deferred.tensors
    assert_same(gradients(module) | {"input": inputs[1].grad}, expected, 1e-12, f"gradient, {module},")


def weights_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of what is deferred."""
    return {name: gradient for name, gradient in gradients(module).items() if "norm" not in name}


def some(*shape: int, wants: bool = True) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double().requires_grad_(wants)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


@settings(max_examples=25)
@given(st.data())
def test_a_convolutions_gradients_are_autograds(data):
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(least, most), st.integers(least, most)))

    groups = data.draw(st.integers(1, 2))
    module = nn.Conv2d(
        groups * data.draw(st.integers(1, 2)),
        groups * data.draw(st.integers(1, 3)),
        pair(1, 3),
        stride=pair(1, 2),
        padding=pair(0, 2),
        dilation=pair(1, 2),
        groups=groups,
        bias=data.draw(st.booleans()),
    )
    if data.draw(st.booleans()):
        frozen(module, data.draw(st.sampled_from([name for name, _ in module.named_parameters()])))
    compare(module, some(2, module.in_channels, 6, 7, wants=data.draw(st.booleans())))


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([(), ("weight",), ("bias",), ("weight", "bias")]),
    st.booleans(),
)
def test_a_linear_layers_gradients_are_autograds_for_any_number_of_dimensions(shape, bias, names, wants):
    module = nn.Linear(4, 3, bias=bias)
    compare(
        frozen(module, *(name for name in names if bias or name == "weight")), some(*shape, 4, wants=wants)
    )


def test_layers_with_other_functions_between_them_and_one_used_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.other = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(F.gelu(self.layer(x)))
            return self.layer(x) * self.other(x).sigmoid()

    for recompute in (False, True):
        compare(Twice(), some(3, 4), recompute=recompute)


@pytest.mark.parametrize(
    "make, batch_of",
    [
        (lambda: gpt(num_layers=1), text),
        (lambda: gpt(num_layers=1, num_kv_heads=1, tied=False), text),
        (lambda: mlp(3), vectors),
        (cnn, images),
    ],
    ids=["tied", "grouped_query", "mlp", "cnn"],
)
def test_the_lessons_models_have_autograds_gradients(make, batch_of):
    x, _ = batch_of(2)
    for recompute in (False, True):
        model, reference = make(), make()
        stage, deferred = Stage(model, parts_of(model)), DeferredGradients()

        def forward(x: Tensor) -> Tensor:
            with deferring(deferred):
                return stage(x).square().mean()

        (checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)).backward()
        deferred.run()
        reference(x).square().mean().backward()
        assert_same(gradients(model), gradients(reference), 1e-12, f"gradient, recompute={recompute},")


def test_only_weights_wait_and_norms_and_embeddings_have_their_gradients_at_once():
    model, reference = gpt(num_layers=1, tied=False), gpt(num_layers=1, tied=False)
    deferred, (x, _) = DeferredGradients(), text(2)
    with deferring(deferred):
        y = model(x).square().mean()
    y.backward()
    at_once = {name for name, gradient in gradients(model).items() if gradient is not None}
    assert at_once == {n for n, _ in model.named_parameters() if "norm" in n or "embedding" in n}
    reference(x).square().mean().backward()
    assert_same(only(gradients(model), at_once), only(gradients(reference), at_once), 1e-12)
    assert len(deferred.waiting) == 7  # q, k, v, o, up, down and the head


def test_without_gradients_or_outside_nothing_is_deferred():
    layer, deferred = nn.Linear(2, 2), DeferredGradients()
    with deferring(deferred), torch.no_grad():
        assert not layer(torch.ones(1, 2)).requires_grad
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None and not deferred.waiting


def test_what_is_frozen_keeps_nothing_for_later():
    x = torch.ones(2, 4, requires_grad=True)
    for module in (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)):
        deferred = DeferredGradients()
        with deferring(deferred):
            y = module.requires_grad_(False)(x)
        y.sum().backward()
        assert not deferred.tensors and not deferred.waiting


def test_what_cannot_wait_is_left_to_autograd():
    """Weights that are computed from others, inputs without a batch, and a padding in words."""

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    computed = nn.utils.parametrize.register_parametrization
    cases: list[tuple[nn.Module, Tensor]] = [
        (computed(nn.Linear(4, 3), "weight", Halved()), some(2, 4)),
        (computed(nn.Linear(4, 3), "bias", Halved()), some(2, 4)),
        (nn.Linear(4, 3), some(4)),
        (nn.Conv2d(2, 3, 3, padding="same"), some(2, 2, 5, 5)),
        (nn.Conv2d(2, 3, 3), some(2, 5, 5)),
        (nn.MultiheadAttention(4, 2, batch_first=True), some(2, 3, 4)),
    ]
    for module, x in cases:
        module.double()
        found = []
        for is_deferred in (False, True):
            module.zero_grad()
            deferred, given = DeferredGradients(), x.detach().clone().requires_grad_()
            with deferring(deferred) if is_deferred else nullcontext():
                y = (
                    module(given, given, given)[0]
                    if isinstance(module, nn.MultiheadAttention)
                    else module(given)
                )
            y.square().sum().backward()
            deferred.run()
            found.append(gradients(module) | {"input": given.grad})
        assert_same(found[1], found[0], 1e-12, f"gradient, {module},")


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_a_complex_layers_gradients_are_autograds():
    module = nn.Linear(4, 3).to(torch.complex128)
    found = []
    for is_deferred in (False, True):
        module.zero_grad()
        deferred, x = DeferredGradients(), torch.complex(some(2, 4), 2 * some(2, 4)).detach().requires_grad_()
        with deferring(deferred) if is_deferred else nullcontext():
            y = module(x * 1j)
        (y.real * y.imag).sum().backward()
        deferred.run()
        found.append([x.grad, module.weight.grad, module.bias.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make, batch_of", [(mlp, vectors), (lambda _: cnn(), images)], ids=["mlp", "cnn"])
def test_under_autocast_gradients_are_autograds_to_the_bit(make, batch_of, recompute: bool):
    (x, _), found = batch_of(3), []
    for is_deferred in (False, True):
        model = make(3).float()
        given = x.float().requires_grad_()
        for _ in range(2):
            deferred = DeferredGradients()

            def forward(x: Tensor) -> Tensor:
                with deferring(deferred) if is_deferred else nullcontext():
                    return model(x).float().square().mean()

            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = checkpoint(forward, given, use_reentrant=False) if recompute else forward(given)
            loss.backward()
            deferred.run()
        found.append(gradients(model) | {"input": given.grad})
        assert {gradient.dtype for gradient in found[-1].values()} == {torch.float32}
    assert_same(found[1], found[0], 0, "gradient,")


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make, batch_of", [(mlp, vectors), (lambda _: cnn(), images)], ids=["mlp", "cnn"])
def test_nothing_stays_alive_when_the_weight_gradients_are_there(make, batch_of, recompute: bool):
    """Without the garbage collector's help: a circle would keep a microbatch until it happens to run."""
    model, x = make(3), batch_of(2)[0]
    stage = Stage(model, parts_of(model))
    runner = AutogradRunner(stage, microbatches=1, recompute=recompute, split=True)
    saved: list[StorageWeakRef] = []
    own = {StorageWeakRef(t.untyped_storage()) for t in [x, *model.parameters()]}

    def note(tensor: Tensor) -> Tensor:
        saved.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.detach()

    def noted() -> list[StorageWeakRef]:
        return [reference for reference in saved if reference not in own]

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = runner.forward(0, x)
            runner.backward_input(0, torch.ones_like(y))
        saved += [StorageWeakRef(tensor.untyped_storage()) for tensor in runner.deferred_tensors(0)]
        assert any(not reference.expired() for reference in noted())
        runner.backward_weight(0)
        del y
        assert all(reference.expired() for reference in noted())
    finally:
        gc.enable()


def test_gradients_carry_no_graph_and_take_only_their_own_memory():
    model, (x, _) = mlp(4), vectors(6)
    before = live_bytes({"parameters": model.parameters()})["other"]
    runner = AutogradRunner(Stage(model, parts_of(model)), microbatches=1, split=True)
    for microbatch in range(3):
        runner.backward_input(microbatch, torch.ones_like(runner.forward(microbatch, x)))
    for microbatch in range(3):
        runner.backward_weight(microbatch)
    for parameter in model.parameters():
        assert parameter.grad.grad_fn is None and not parameter.grad.requires_grad
    held = live_bytes({"parameters": model.parameters(), "gradients": [p.grad for p in model.parameters()]})
    assert held["gradients"] == held["parameters"] and held["other"] == before
