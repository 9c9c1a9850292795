"""The planner's models of time and memory come close to published training runs (published_runs.py)."""

import statistics
from dataclasses import replace

import pytest

from hybrid_parallel.planner.memory import predict_memory
from hybrid_parallel.planner.step_time import TimeModel
from tests.hybrid_parallel.published_runs import EXPERTS, LATER, LLAMA, MEGATRON, RING, SHARDED, Run

ALL = [*MEGATRON, *LLAMA, *LATER, *SHARDED, *RING, *EXPERTS]


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.name)
def test_the_predicted_utilisation_is_within_20_percent_of_the_published_one(run: Run):
    assert abs(run.error()) < 0.20


@pytest.mark.parametrize(
    "runs",
    [MEGATRON, LLAMA, LATER, SHARDED, EXPERTS],
    ids=["2021", "llama", "2022", "zero3", "experts"],
)
def test_the_mean_error_of_a_table_is_under_10_percent(runs: list[Run]):
    assert statistics.mean(abs(run.error()) for run in runs) < 0.10


def test_runs_with_a_ring_are_predicted_too_low_by_about_the_same_share():
    errors = [run.error() for run in RING]
    assert min(errors) > -0.17 and max(errors) - min(errors) < 0.06 and max(errors) < 0


def test_the_seconds_of_experts_explain_what_runs_with_eight_expert_ranks_take():
    for run in EXPERTS[2:]:
        model = TimeModel(run.shape, run.machine, run.batch)
        seconds = model.predict(run.sizes)
        without = model.utilisation(run.sizes, seconds.total - seconds.experts)
        assert abs(without / run.utilisation - 1) > 0.05 > abs(run.error()), run.name


@pytest.mark.parametrize("run", [*MEGATRON, *LLAMA, *SHARDED, *RING, *EXPERTS], ids=lambda run: run.name)
def test_a_published_run_fits_into_its_devices(run: Run):
    sizes = replace(run.sizes, zero=2) if run in LLAMA else run.sizes  # it also divides the gradients
    memory = predict_memory(run.shape, sizes, run.batch)
    assert memory.total < run.machine.device.memory_bytes


def test_the_runs_of_megatron_would_not_fit_without_recomputation():
    for run in MEGATRON:
        memory = predict_memory(run.shape, replace(run.sizes, recompute=False), run.batch)
        assert memory.total > run.machine.device.memory_bytes, run.name
