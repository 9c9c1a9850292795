"""Test what the options of this lesson's scripts do to a run's bytes, rows and losses.

tests/test_scripts.py asks of all scripts what they do with their defaults.
"""

import math
from typing import Any

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.run_modes import train

SHORT = ("--steps", "5", "--batch-size", "8", "--size", "tiny", "--lr", "3e-3", "--seed", "1")
Reports = dict[str, dict[str, Any]]

# Mode and options, and the rows that the run's report must have.
RUNS: dict[str, dict[str, Any]] = {
    "data_parallel_compressed --compress float32": {"bytes_share": 1.0},
    "data_parallel_compressed --compress bf16 --grad-acc-steps 2": {"bytes_share": 0.5},
    "data_parallel_compressed --compress int8 --no-error-feedback": {},
    "data_parallel_compressed --compress topk --topk-share 0.02": {},
    "data_parallel_compressed --compress powersgd --powersgd-rank 2 --compress-after 1": {},
    "local_sgd --sync-every 2 --average-state": {"sync_every": 2},
    "local_sgd --sync-every 3 --optimizer momentum --lr 0.1": {"sync_every": 3},
    "diloco --sync-every 2 --optimizer sgd --outer-lr 1 --outer-momentum 0": {
        "sync_every": 2,
        "fragments": 1,
    },
    "diloco --sync-every 4 --fragments 2 --delay 1": {"sync_every": 4, "fragments": 2},
    "diloco --sync-every 4 --fragments 2 --delay 3 --wire-dtype int8": {"sync_every": 4, "fragments": 2},
    "hsdp --shard-size 1": {"machines": 4},
    "hsdp --shard-size 2 --grad-acc-steps 2 --clip 0.5 --optimizer momentum": {"machines": 2},
    "hsdp --shard-size 4": {"machines": 1},
}


@pytest.fixture(scope="module")
def reports() -> list[Reports]:
    """Return each rank's reports, by mode and options."""

    def work(cluster: Cluster) -> Reports:
        runs = {run: run.split() for run in RUNS}
        return {run: train(cluster, mode, *SHORT, *options) for run, (mode, *options) in runs.items()}

    return run_ranks(work, 4, timeout=300)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_sends_what_the_formula_says_and_reports_its_rows(reports: list[Reports], run: str):
    for of_rank in reports:
        report = of_rank[run]
        assert report["bytes_sent"] == report["bytes_formula"] > 0
        assert report["messages_sent"] == report["messages_formula"]
        assert report["replicas_equal"]
        assert math.isfinite(report["validation_loss"])
        assert report["validation_loss"] < report["first_loss"]
        assert {name: report[name] for name in RUNS[run]} == pytest.approx(RUNS[run], rel=1e-2)


def test_fewer_bits_and_fewer_synchronisations_are_fewer_bytes(reports: list[Reports]):
    sent = {run: report["bytes_sent"] for run, report in reports[0].items()}
    full, half, quarter, few, thin = (sent[run] for run in list(RUNS)[:5])
    assert few < quarter < half < full > thin
    often, rarely = (sent[run] for run in list(RUNS)[8:10])
    assert rarely < often


def test_with_hsdp_one_machine_sends_nothing_to_others_and_one_rank_a_machine_all(reports: list[Reports]):
    alone, two, one = ([of_rank[run] for of_rank in reports] for run in list(RUNS)[-3:])
    assert all(report["shards_bytes_sent"] == 0 < report["replicas_bytes_sent"] for report in alone)
    assert all(report["shards_bytes_sent"] > report["replicas_bytes_sent"] > 0 for report in two)
    assert all(report["shards_bytes_sent"] > 0 == report["replicas_bytes_sent"] for report in one)
    for name in ("parameters_bytes", "gradients_bytes"):
        assert alone[0][name] > two[0][name] > one[0][name]
