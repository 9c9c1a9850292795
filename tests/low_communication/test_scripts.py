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
Reports = dict[str, list[dict[str, Any]]]  # of all ranks

# Mode and options, and the rows that the run's report must have.
RUNS: dict[str, dict[str, Any]] = {
    "data_parallel_compressed --compress bf16 --grad-acc-steps 2": {"bytes_share": 0.5},
    "data_parallel_compressed --compress int8 --no-error-feedback": {},
    "data_parallel_compressed --compress topk --topk-share 0.02": {},
    "data_parallel_compressed --compress powersgd --powersgd-rank 2 --compress-after 1": {},
    "local_sgd --sync-every 3 --average-state --optimizer momentum --lr 0.1": {"sync_every": 3},
    "diloco --sync-every 2 --optimizer sgd --outer-lr 1 --outer-momentum 0": {"fragments": 1},
    "diloco --sync-every 4 --fragments 2 --delay 3 --wire-dtype int8": {"sync_every": 4, "fragments": 2},
    "hsdp --shard-size 1": {"machines": 4},
    "hsdp --shard-size 2 --grad-acc-steps 2 --clip 0.5 --optimizer momentum": {"machines": 2},
    "hsdp --shard-size 4": {"machines": 1},
}


@pytest.fixture(scope="module")
def reports() -> Reports:
    """Return the reports of all ranks, by mode and options: four for hybrid sharding, and else two."""

    def work(cluster: Cluster, runs: list[str]) -> list[dict[str, Any]]:
        return [train(cluster, mode, *SHORT, *options) for mode, *options in map(str.split, runs)]

    found: Reports = {}
    for world_size in (2, 4):
        runs = [run for run in RUNS if run.startswith("hsdp") == (world_size == 4)]
        by_rank = run_ranks(work, world_size, runs, timeout=300)
        found |= zip(runs, map(list, zip(*by_rank, strict=True)), strict=True)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_a_run_sends_what_the_formula_says_and_reports_its_rows(reports: Reports, run: str):
    for report in reports[run]:
        assert report["bytes_sent"] == report["bytes_formula"] > 0
        assert report["messages_sent"] == report["messages_formula"]
        assert report["replicas_equal"]
        assert math.isfinite(report["validation_loss"])
        assert report["validation_loss"] < report["first_loss"]
        assert {name: report[name] for name in RUNS[run]} == pytest.approx(RUNS[run], rel=1e-2)


def test_with_hsdp_one_machine_sends_nothing_to_others_and_one_rank_a_machine_all(reports: Reports):
    alone, two, one = (reports[run] for run in list(RUNS)[-3:])
    assert all(report["shards_bytes_sent"] == 0 < report["replicas_bytes_sent"] for report in alone)
    assert all(report["shards_bytes_sent"] > report["replicas_bytes_sent"] > 0 for report in two)
    assert all(report["shards_bytes_sent"] > 0 == report["replicas_bytes_sent"] for report in one)
    for name in ("parameters_bytes", "gradients_bytes"):
        assert alone[0][name] > two[0][name] > one[0][name]
