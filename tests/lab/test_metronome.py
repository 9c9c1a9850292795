from typing import Any

import pytest
import torch

from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace import metronome as metronome_module
from lab.trace.metronome import Metronome, metronome_of

LAYERS = 3
X = torch.zeros(2, 5, dtype=torch.long)


def metronome(tied: bool, seconds: float = 0.25) -> Metronome:
    return metronome_of(GPT(GPTConfig.named("tiny", num_layers=LAYERS, tied=tied)), seconds)


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


@pytest.mark.parametrize("tied", [True, False])
def test_the_hooks_of_a_layer_run_after_its_sleep_and_before_the_sleep_of_the_layer_below(tied, log):
    model = metronome(tied)
    for name, parameter in model.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    loss = loss_of(model(X), X)
    assert log == [0.25] * LAYERS
    log.clear()
    loss.backward()
    groups: list[set[str]] = []  # the names that were logged after each sleep
    for entry in log:
        groups[-1].add(entry) if isinstance(entry, str) else groups.append(set())
    names = [name for name, _ in model.model.named_parameters()]
    assert groups == [{name for name in names if home(name) == layer} for layer in reversed(range(LAYERS))]
    # Making the gradients is part of the layer's time.
    assert all(0 < entry <= 0.5 for entry in log if not isinstance(entry, str))
