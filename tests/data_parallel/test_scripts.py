"""Test what is special to data parallel train scripts: equal bits, predictions, hidden messages, traces."""

import json
import os
from typing import Any

import pytest

from comm.wire.hosts import VARIABLE
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.training.attempts import train

ASYNCHRONOUS = ["overlap", "bucket", "ddp"]
TRACED = ["naive", "bucket"]


def test_on_two_ranks_all_wrappers_end_with_the_same_bits_and_microbatches_change_rounding_only():
    # a + b is b + a, and both are halved exactly.
    def work(cluster: Cluster) -> list[dict[str, dict[str, Any]]]:
        names = ["accumulation", *ASYNCHRONOUS, "cnn"]
        return [{name: train(cluster, name, steps=2, grad_acc_steps=n) for name in names} for n in (1, 2)]

    full, in_parts = run_ranks(work, 2)[0]
    alone = run_ranks(lambda cluster: train(cluster, "cnn", steps=2), 1)[0]
    for reports in (full, in_parts):
        assert reports["cnn"]["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-4)
        assert len({report["replica_digest"] for name, report in reports.items() if name != "cnn"}) == 1
    for name, report in in_parts.items():
        assert report["replica_digest"] != full[name]["replica_digest"]
        assert report["last_loss"] == pytest.approx(full[name]["last_loss"], rel=1e-4)
        assert report["bytes_sent"] == report["bytes_formula"] == full[name]["bytes_sent"]
        assert report["predicted_step_seconds"] >= report["compute_seconds"] * (1 - 1e-9) > 0
        assert 0 <= report["hidden_share"] <= 1 and report["communication_seconds"] > 0


def test_a_hierarchical_all_reduce_between_hosts_trains_and_its_traffic_is_counted():
    def work(cluster: Cluster) -> None:
        os.environ[VARIABLE] = "aabb"[cluster.rank]
        report = train(cluster, "bucket", steps=1, pattern="hierarchical")
        assert report["bytes_sent"] == report["bytes_formula"]
        assert report["messages_sent"] == report["messages_formula"]
        assert report["replicas_equal"]

    run_ranks(work, 4)


def test_under_the_metronome_all_scripts_but_naive_hide_communication_and_their_traces_show_it(tmp_path):
    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        slow = {"metronome": "5ms", "link": "200mbit,0.1ms", "steps": 6}
        own: dict[str, dict] = {
            "naive": {},
            "overlap": {},
            "bucket": {"bucket_mb": 0.02},
            "ddp": {"bucket_mb": 0.02},
        }
        for name in ("naive", "bucket"):
            own[name]["trace"] = str(tmp_path / name)
        return {name: train(cluster, name, **slow, **more) for name, more in own.items()}

    for reports in run_ranks(work, 2):
        assert reports["naive"]["hidden_share"] == 0
        for name, report in reports.items():
            assert name == "naive" or report["hidden_share"] > 0
            assert report["step_seconds"] >= 2 * 3 * 0.005  # forward and backward of two layers
            assert report["communication_seconds"] >= report["bytes_sent"] / 6 / 25e6 * 0.99
            assert report["bytes_sent"] == report["bytes_formula"]
            assert report["first_loss"] == report["last_loss"]  # nothing is computed
    for name in TRACED:
        picture, trace = (
            next((tmp_path / name).glob(f"data_parallel_{name}*{end}")) for end in (".png", ".json")
        )
        assert picture.read_bytes().startswith(b"\x89PNG")
        rows = json.loads(trace.read_text())["traceEvents"]
        ranks = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
        assert sorted(ranks.values()) == ["rank 0", "rank 1"]
        for pid in ranks:
            mine = [row for row in rows if row["ph"] == "X" and row["pid"] == pid]
            expected = {"forward", "backward", "communication", "optimizer"}
            assert {row["cat"] for row in mine} == expected | (
                {"launch", "wait"} if name != "naive" else set()
            )
            assert [row["name"] for row in mine].count("forward") == 3  # of the steps after the warm-up
