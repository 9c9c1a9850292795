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
