"""What a step takes, sends and holds in memory."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace import meter as meter_module
from lab.trace import metronome as metronome_module
from lab.trace.ledger import LEDGER
from lab.trace.memory import live_bytes, saved_activations
from lab.trace.meter import Meter
from lab.trace.metronome import Metronome, metronome_of
from tests.run_modes import FIELDS


def rank(number: int = 0, world_size: int = 1) -> Cluster:
    return Cluster(number, world_size, number, torch.device("cpu"), dist.HashStore())


def run(steps: int, cluster: Cluster | None = None, as_json: bool = False, **extras: Any) -> dict[str, Any]:
    meter = Meter(cluster or rank(), "train", steps, tokens_per_step=100, as_json=as_json)
    for step in range(steps):
        with meter.step() as record:
            record.loss = 10.0 - step
    return meter.finish(**extras)


@pytest.fixture
def clock(monkeypatch) -> Iterator[list[float]]:
    """A clock that stands still until a test moves it."""
    at = [1000.0]
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: at[0])
    monkeypatch.setattr(meter_module.time, "perf_counter_ns", lambda: int(at[0] * 1e9))
    yield at


def test_the_summary_has_the_fields_of_the_design_in_their_order_and_then_the_extras(capfd):
    summary = run(3, rank(0, 4), as_json=True, bytes_formula=12, replicas_equal=True)
    assert list(summary) == [*FIELDS, "bytes_formula", "replicas_equal"]
    assert [summary[name] for name in FIELDS[:5]] == ["train", 4, 3, 10.0, 8.0]
    out, err = capfd.readouterr()
    assert out == "" and "step 3/3" in err


def test_warm_up_steps_are_neither_in_the_median_nor_in_the_tokens_per_second(clock):
    meter = Meter(rank(), "train", steps=6, tokens_per_step=100)
    for seconds in (50.0, 40.0, 1.0, 2.0, 3.0, 10.0):
        clock[0] += 5.0  # what happens between steps is no step's
        with meter.step() as record:
            clock[0] += seconds
            record.loss = 0.0
    summary = meter.finish()
    assert (summary["step_seconds"], summary["tokens_per_second"]) == (2.5, 100 / 2.5)


def test_the_time_of_a_step_is_the_mean_over_a_round_if_ranks_communicate_in_some_steps_only(clock):
    meter = Meter(rank(), "local_sgd", steps=9, tokens_per_step=100, round_steps=3)
    for seconds in (50.0, 40.0, 1.0, 1.0, 7.0, 1.0, 1.0, 7.0, 1.0):
        with meter.step() as record:
            clock[0] += seconds
            record.loss = 0.0
    assert meter.finish()["step_seconds"] == 3.0


def test_traffic_is_counted_inside_of_steps_and_nowhere_else():
    LEDGER.count("broadcast", "tree", 1_000_000)
    meter = Meter(rank(), "train", steps=3, tokens_per_step=1)
    for _ in range(3):
        with meter.step():
            LEDGER.count("all_reduce", "ring", 70, messages=2)
        LEDGER.count("all_reduce", "tree", 8000)  # between two steps: a validation, for example
    summary = meter.finish()
    assert (summary["bytes_sent"], summary["messages_sent"]) == (210, 6)


def test_a_loss_that_is_no_number_is_none_in_the_summary():
    meter = Meter(rank(), "train", steps=2, tokens_per_step=1)
    for loss in (math.nan, math.inf):
        with meter.step() as record:
            record.loss = torch.tensor(loss)
    summary = meter.finish(worst=[1.0, -math.inf], wait_seconds=[2.0, math.nan])
    assert (summary["first_loss"], summary["last_loss"], summary["worst"]) == (None, None, [1.0, None])


def test_peak_memory_sees_what_was_freed_again_but_not_what_was_freed_before_the_start():
    peak_before = torch.ones(100 << 20, dtype=torch.uint8)
    del peak_before
    quiet = run(1)["peak_memory_bytes"]
    meter = Meter(rank(), "train", steps=1, tokens_per_step=1)
    with meter.step():
        torch.ones(60 << 20, dtype=torch.uint8)
    grown = meter.finish()["peak_memory_bytes"] - quiet
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("this system does not let a process reset its peak")
    assert 50 << 20 < grown < 90 << 20


def test_a_storage_counts_once_however_many_tensors_look_at_it():
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100).t(), whole.detach(), nn.Parameter(whole)]
    assert live_bytes({"mine": [whole, *views]})["mine"] == 4000
    assert live_bytes({"mine": views[:1]})["mine"] == 4000  # what a small view keeps alive
    assert live_bytes({"first": views, "second": [whole]})["second"] == 0


def forward_bytes(model: nn.Module, forward, x: Tensor) -> int:
    with saved_activations(model.parameters) as saved:
        loss = forward(x).square().sum()
    loss.backward()
    return saved.bytes


def test_what_autograd_saves_is_counted_without_the_parameters_and_of_a_recomputed_block_its_input_only():
    layer, x = nn.Linear(10, 20), torch.zeros(3, 10)
    assert forward_bytes(layer, layer, x) == 4 * (3 * 10 + 3 * 20)  # its input, and the square's
    # The weight is saved as well where the input needs a gradient.
    assert forward_bytes(layer, layer, x.requires_grad_()) == 4 * (3 * 10 + 3 * 20)
    layers = nn.Sequential(*(nn.Linear(10, 10) for _ in range(9)))
    assert forward_bytes(layers, layers, x) == 10 * 4 * 30
    assert forward_bytes(layers, lambda x: checkpoint(layers, x, use_reentrant=False), x) == 2 * 4 * 30


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
