"""The planner's models of time and memory come close to published training runs (published_runs.py)."""

import statistics
from dataclasses import replace

import pytest

from hybrid_parallel.planner.memory import predict_memory
from tests.hybrid_parallel.published_runs import EXPERTS, LATER, LLAMA, MEGATRON, RING, SHARDED, Run

ALL = [*MEGATRON, *LLAMA, *LATER, *SHARDED, *RING, *EXPERTS]


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.name)
def test_the_predicted_utilisation_is_within_20_percent_of_the_published_one(run: Run):
    assert abs(run.error()) < 0.20


def test_the_mean_error_of_a_table_is_under_10_percent_but_for_runs_with_a_ring():
    for runs in (MEGATRON, LLAMA, LATER, SHARDED, EXPERTS):
        assert statistics.mean(abs(run.error()) for run in runs) < 0.10
    # These are predicted too low by about the same share (published_runs.py).
    errors = [run.error() for run in RING]
    assert min(errors) > -0.17 and max(errors) - min(errors) < 0.06 and max(errors) < 0


def test_a_published_run_fits_into_its_devices_and_those_of_megatron_only_with_recomputation():
    for run in (run for run in ALL if run not in LATER):
        sizes = replace(run.sizes, zero=2) if run in LLAMA else run.sizes  # it also divides the gradients
        assert predict_memory(run.shape, sizes, run.batch).total < run.machine.memory_bytes, run.name
    for run in MEGATRON:
        memory = predict_memory(run.shape, replace(run.sizes, recompute=False), run.batch)
        assert memory.total > run.machine.memory_bytes, run.name
