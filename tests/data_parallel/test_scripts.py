"""Test what is special to data parallel train scripts: equal bits, predictions, hidden messages, traces."""

import functools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from comm.cost import Link
from comm.wire.hosts import VARIABLE
from data_parallel import (
    train_bucket_overlap,
    train_ddp,
    train_naive,
    train_naive_grad_accumulation,
    train_overlap,
)
from lab.cluster import Cluster
from lab.ranks import run_ranks
from training.arguments import AccumulationArgs
from training.run import Run

# An optimizer imports torch._dynamo, which takes a second or more in every new rank.

SCRIPTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "naive": (train_naive, train_naive.Args, {}),
    "accumulation": (
        train_naive_grad_accumulation,
        train_naive_grad_accumulation.Args,
        {"grad_acc_steps": 2},
    ),
    "overlap": (train_overlap, AccumulationArgs, {}),
    "bucket": (train_bucket_overlap, train_bucket_overlap.BucketArgs, {"bucket_mb": 0.01}),
    "ddp": (train_ddp, train_ddp.Args, {"bucket_mb": 0.1}),
    "cnn": (train_ddp, train_ddp.Args, {"model": "baby_cnn", "batch_size": 240, "lr": 1e-2}),
}
GPTS = [name for name in SCRIPTS if name != "cnn"]
STEPS = 6
ASYNCHRONOUS = ["overlap", "bucket", "ddp"]


def train(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Run a script's `main` with a tiny model and a known alpha and beta, and return this rank's summary."""
    script, args, own = SCRIPTS[name]
    settings = args(**{"size": "tiny", "batch_size": 12, "steps": STEPS, "lr": 3e-3} | own | changes)
    summaries = []
    finish = Run.finish

    def noting(*args: Any, **extras: Any) -> None:
        summaries.append(finish(*args, **extras))

    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
    ):
        script.main(cluster, settings)
    return summaries[0]


@functools.cache
def everyones_summaries(world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Return the summaries of every script, in rank order."""

    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        return {name: train(cluster, name) for name in SCRIPTS}

    by_rank = run_ranks(work, world_size)
    return {name: [summaries[name] for summaries in by_rank] for name in SCRIPTS}


def test_a_step_is_predicted_and_takes_no_less_than_its_computing():
    for by_rank in everyones_summaries(2).values():
        for summary in by_rank:
            assert 0 < summary["compute_seconds"] <= summary["step_seconds"]
            assert summary["predicted_step_seconds"] >= summary["compute_seconds"] * (1 - 1e-9)
            assert 0 <= summary["hidden_share"] <= 1
            assert summary["communication_seconds"] > 0


def test_the_loss_of_a_convolutional_network_falls_and_does_not_depend_on_the_number_of_ranks():
    alone, other = (everyones_summaries(world_size)["cnn"][0] for world_size in (1, 2))
    assert alone["last_loss"] < 0.97 * alone["first_loss"]
    assert other["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-4)


def test_the_losses_do_not_depend_on_the_number_of_microbatches():
    def work(cluster: Cluster) -> list[tuple[str, list[dict[str, Any]]]]:
        names = ["accumulation", *ASYNCHRONOUS, "cnn"]
        return [
            (name, [train(cluster, name, steps=2, grad_acc_steps=n) for n in (1, 2, 3)]) for name in names
        ]

    for _, (full, *in_parts) in run_ranks(work, 2)[0]:
        for summary in in_parts:
            assert summary["first_loss"] == pytest.approx(full["first_loss"], rel=1e-5)
            assert summary["last_loss"] == pytest.approx(full["last_loss"], rel=1e-4)
            assert summary["bytes_sent"] == summary["bytes_formula"] == full["bytes_sent"]


def test_on_two_ranks_all_wrappers_end_with_the_same_bits():
    # a + b is b + a, and both are halved exactly.
    def work(cluster: Cluster) -> list[set[str]]:
        full = [train(cluster, name, steps=3, grad_acc_steps=1) for name in ("accumulation", *ASYNCHRONOUS)]
        in_parts = [
            train(cluster, name, steps=3, grad_acc_steps=2) for name in ("accumulation", *ASYNCHRONOUS)
        ]
        full.append(train(cluster, "naive", steps=3))
        return [{summary["replica_digest"] for summary in runs} for runs in (full, in_parts)]

    full, in_parts = run_ranks(work, 2)[0]
    assert len(full) == len(in_parts) == 1
    assert full != in_parts


def test_a_hierarchical_all_reduce_between_hosts_trains_and_its_traffic_is_counted():
    def work(cluster: Cluster) -> list[int]:
        os.environ[VARIABLE] = "abb"[cluster.rank]
        sent = []
        for name in ("naive", "bucket"):
            summary = train(cluster, name, steps=2, pattern="hierarchical")
            assert summary["bytes_sent"] == summary["bytes_formula"], name
            assert summary["messages_sent"] == summary["messages_formula"], name
            assert summary["replicas_equal"], name
            sent.append(summary["bytes_sent"])
        return sent

    of_a, leader_of_b, _ = run_ranks(work, 3)
    # between two hosts each leader sends one tensor, and the leader of b also broadcasts it
    assert all(two > 1.9 * one for one, two in zip(of_a, leader_of_b, strict=True))


def test_under_the_metronome_all_scripts_but_naive_hide_communication():
    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        slow = {"metronome": "5ms", "link": "200mbit,0.1ms", "steps": 3, "bucket_mb": 0.02}
        naive = {key: value for key, value in slow.items() if key != "bucket_mb"}
        return {
            name: train(cluster, name, **(slow if name in ("bucket", "ddp") else naive))
            for name in ["naive", *ASYNCHRONOUS]
        }

    for summaries in run_ranks(work, 2):
        assert summaries["naive"]["hidden_share"] == 0
        for name, summary in summaries.items():
            assert name == "naive" or summary["hidden_share"] > 0
            assert summary["step_seconds"] >= 2 * 3 * 0.005  # forward and backward of two layers
            assert summary["communication_seconds"] >= summary["bytes_sent"] / 3 / 25e6 * 0.99
            assert summary["bytes_sent"] == summary["bytes_formula"]
            assert summary["first_loss"] == summary["last_loss"]  # nothing is computed


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the trace, and check that a picture stands beside it."""
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["naive", *ASYNCHRONOUS])
def test_a_trace_shows_what_every_rank_did(tmp_path, name):
    run_ranks(lambda cluster: train(cluster, name, steps=3, link="10mbit", trace=str(tmp_path)), 2)
    rows = rows_of(tmp_path)
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert sorted(processes.values()) == ["rank 0", "rank 1"]
    for pid in processes:
        kinds = {row["cat"] for row in rows if row["ph"] == "X" and row["pid"] == pid}
        expected = {"forward", "backward", "communication", "optimizer"}
        assert kinds == expected | ({"launch", "wait"} if name != "naive" else set())


def test_a_trace_shows_up_to_three_steps_after_the_warm_up(tmp_path, capsys):
    def work(cluster: Cluster) -> None:
        for steps in (1, 3, 6):
            train(cluster, "naive", steps=steps, trace=str(tmp_path / str(steps)))

    run_ranks(work, 1)
    folder = tmp_path / "6"
    assert (
        f"The trace is in {folder / 'trace.json'} and {folder / 'timeline.png'}." in capsys.readouterr().out
    )
    for steps, drawn in [(1, 1), (3, 1), (6, 3)]:
        assert [row["name"] for row in rows_of(tmp_path / str(steps))].count("forward") == drawn
