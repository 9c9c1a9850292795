import copy
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace import metronome as metronome_module
from lab.trace.metronome import Metronome, metronome_of

LAYERS = 3
TIED = GPTConfig.named("tiny", num_layers=LAYERS)
UNTIED = GPTConfig.named("tiny", num_layers=LAYERS, tied=False)
X = torch.zeros(2, 5, dtype=torch.long)
both = pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])


def backward(model: Metronome) -> None:
    loss_of(model(X), X).backward()


def home(name: str) -> int:
    """Return the layer in which the backward completes the gradient of parameter `name`."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if "embedding" in name else LAYERS - 1


@pytest.fixture
def log(monkeypatch) -> list[Any]:
    """Return a list to which a sleep adds its seconds, instead of taking them."""
    entries: list[Any] = []
    monkeypatch.setattr(metronome_module.time, "sleep", entries.append)
    return entries


def listen(model: Metronome, log: list[Any]) -> None:
    """Let every parameter log its name when its gradient is complete."""
    for name, parameter in model.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))


def by_layer(log: list[Any]) -> list[set[str]]:
    """Return the names that were logged after each sleep."""
    groups: list[set[str]] = []
    for entry in log:
        if isinstance(entry, str):
            groups[-1].add(entry)
        else:
            groups.append(set())
    return groups


@both
def test_its_parameters_are_the_gpts_in_the_same_order_and_so_is_its_state(config):
    gpt = GPT(config)
    model = metronome_of(gpt, 0.0)
    expected = [(f"model.{name}", parameter) for name, parameter in gpt.named_parameters()]
    for (name, parameter), (expected_name, expected_parameter) in zip(
        model.named_parameters(), expected, strict=True
    ):
        assert name == expected_name and parameter is expected_parameter
    assert list(model.state_dict()) == [f"model.{name}" for name in gpt.state_dict()]
    model.load_state_dict(metronome_of(GPT(config, seed=4), 0.0).state_dict())
    assert torch.equal(gpt.blocks[0].mlp.up_proj.weight, GPT(config, seed=4).blocks[0].mlp.up_proj.weight)


def test_the_logits_are_cheap_and_the_loss_is_that_of_a_uniform_guess():
    logits_btv = metronome_of(GPT(TIED), 0.0)(X)
    assert logits_btv.shape == (2, 5, 256) and logits_btv.requires_grad
    assert logits_btv.untyped_storage().nbytes() == 4
    assert loss_of(logits_btv, X).item() == pytest.approx(torch.tensor(256.0).log().item())
    assert metronome_of(GPT(TIED).double(), 0.0)(X).dtype == torch.float64


@both
def test_every_parameter_gets_a_gradient_of_zeros_of_its_own(config):
    model = metronome_of(GPT(config).double(), 0.0)
    backward(model)
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == torch.float64
        assert parameter.grad.is_contiguous() and not parameter.grad.any()
    count = len(list(model.parameters()))
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}) == count


def test_a_gradient_is_kept_without_a_copy(monkeypatch):
    made, zeros_like = set(), torch.zeros_like

    def watched(parameter: torch.Tensor) -> torch.Tensor:
        zeros = zeros_like(parameter)
        made.add(zeros.data_ptr())
        return zeros

    model = metronome_of(GPT(UNTIED), 0.0)
    loss = loss_of(model(X), X)
    monkeypatch.setattr(torch, "zeros_like", watched)
    loss.backward()
    assert {parameter.grad.data_ptr() for parameter in model.parameters()} == made


def test_gradients_accumulate_in_place_until_they_are_cleared():
    model = metronome_of(GPT(TIED), 0.0)
    backward(model)
    first = [parameter.grad.data_ptr() for parameter in model.parameters()]
    backward(model)
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == first


@both
def test_the_hooks_of_a_layer_run_after_its_sleep_and_before_the_sleep_of_the_layer_below(config, log):
    model = metronome_of(GPT(config), 0.25)
    listen(model, log)
    loss = loss_of(model(X), X)
    assert log == [0.25] * LAYERS
    log.clear()
    loss.backward()
    names = [name for name, _ in model.model.named_parameters()]
    assert by_layer(log) == [
        {name for name in names if home(name) == layer} for layer in reversed(range(LAYERS))
    ]
    assert len([entry for entry in log if isinstance(entry, str)]) == len(names)
    # Making the gradients is part of the layer's time.
    assert all(0 < entry <= 0.5 for entry in log if not isinstance(entry, str))


def test_a_slow_hook_delays_the_layers_below(log):
    model = metronome_of(GPT(TIED), 0.25)
    model.model.final_norm.weight.register_post_accumulate_grad_hook(lambda _: log.append("slow"))
    backward(model)
    sleeps = log[LAYERS:]
    assert sleeps[1] == "slow" and len(sleeps) == LAYERS + 1


def test_a_layer_of_one_is_the_first_and_the_last(log):
    model = metronome_of(GPT(GPTConfig.named("tiny", num_layers=1, tied=False)), 0.25)
    listen(model, log)
    backward(model)
    assert by_layer(log)[1:] == [{name for name, _ in model.model.named_parameters()}]


@pytest.mark.parametrize("prefix", ["blocks.0", "token_embedding", "blocks.1", "blocks.2.mlp", ""])
def test_frozen_parameters_get_no_gradient_and_the_time_stays_the_same(log, prefix):
    model = metronome_of(GPT(TIED), 0.25)
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))
    listen(model, log)
    backward(model)
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    assert len([entry for entry in log if not isinstance(entry, str)]) == 2 * LAYERS


def test_real_time_passes_between_the_layers():
    seconds = 0.02
    model = metronome_of(GPT(TIED), seconds)
    at: dict[str, float] = {}

    def note(name: str) -> None:
        at[name] = time.perf_counter()

    for name, parameter in model.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    start = time.perf_counter()
    loss = loss_of(model(X), X)
    middle = time.perf_counter()
    assert middle - start > 0.95 * model.forward_seconds
    loss.backward()
    layers = [[t for name, t in at.items() if home(name) == layer] for layer in range(LAYERS)]
    assert min(layers[-1]) - middle > 0.95 * model.last_layer_backward_seconds
    for below, above in pairwise(layers):
        assert min(below) - max(above) > 0.95 * 2 * seconds
    assert time.perf_counter() - middle > 0.95 * model.backward_seconds


def test_other_threads_run_while_a_layer_sleeps():
    model, ticks, done = metronome_of(GPT(TIED), 0.02), [0], threading.Event()

    def communicate() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=communicate)
    loss = loss_of(model(X), X)
    thread.start()
    loss.backward()
    done.set()
    thread.join()
    assert ticks[0] >= LAYERS


def test_the_times_of_the_formula():
    model = metronome_of(GPT(TIED), 0.25)
    assert (model.forward_seconds, model.backward_seconds) == (0.75, 1.5)
    assert model.last_layer_backward_seconds == 0.5


def test_a_copy_has_gradients_of_its_own():
    model = metronome_of(GPT(TIED), 0.0)
    twin = copy.deepcopy(model)
    backward(twin)
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_graph_it_only_takes_its_time(log):
    with torch.no_grad():
        assert not metronome_of(GPT(TIED), 0.25)(X).requires_grad
    assert log == [0.25] * LAYERS


def test_layers_that_do_not_hold_each_parameter_once_are_refused():
    gpt = GPT(TIED)
    everything = list(gpt.parameters())
    for layers in ([], [everything, everything[:1]], [everything[1:]]):
        with pytest.raises(ValueError, match="exactly once"):
            Metronome(gpt, layers, 0.0, 256)
