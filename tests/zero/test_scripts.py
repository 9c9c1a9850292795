"""Test what is special to the train scripts of ZeRO: memory, equal bits, what options change, refusals."""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tyro
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel import test_scripts
from tests.data_parallel.test_scripts import rows_of
from tests.training import attempts
from tests.training.attempts import the_one_sentence
from training.run import Run
from zero import train_fsdp, train_zero1, train_zero2, train_zero3
from zero.train_zero1 import Args as BucketedZeroArgs

SCRIPTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "zero1": (train_zero1, BucketedZeroArgs, {"bucket_mb": 0.02}),
    "zero2": (train_zero2, BucketedZeroArgs, {"bucket_mb": 0.02}),
    "zero3": (train_zero3, train_zero3.Args, {}),
    "fsdp": (train_fsdp, train_fsdp.Args, {}),
}


OURS = ["zero1", "zero2", "zero3"]


HELD = ["parameters", "gradients", "optimizer_state"]


@contextmanager
def known() -> Iterator[None]:
    """Let the helpers of test_scripts and attempts run these scripts too."""
    with mock.patch.dict(test_scripts.SCRIPTS, SCRIPTS):
        yield


def train(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return this rank's summary; its "weights" are those of a plain model, the same for every wrapper."""
    if not gc.get_freeze_count():
        gc.freeze()  # the memory report collects garbage, and need not search what torch has imported
    found, finish = {}, Run.finish

    def keeping(self: Run, model: nn.Module, **extras: Any) -> dict[str, Any]:
        state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
        found.update({n.removeprefix("module."): tensor.detach().clone() for n, tensor in state.items()})
        return finish(self, model, **extras)

    with known(), mock.patch.object(Run, "finish", keeping):
        return test_scripts.train(cluster, name, **changes) | {"weights": found}


def refusal(cluster: Cluster, name: str, **changes: Any) -> str:
    with known():
        return attempts.refusal(cluster, name, **changes)


@functools.cache
def everyones_summaries(world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Return the summaries of every script, in rank order, and of naive data parallelism beside them."""
    names = ["naive", *SCRIPTS]
    by_rank = run_ranks(lambda cluster: {name: train(cluster, name) for name in names}, world_size)
    return {name: [summaries[name] for summaries in by_rank] for name in names}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_rank_holds_the_bytes_of_the_formula_and_padding(name, world_size):
    summaries = everyones_summaries(world_size)[name]
    for summary in summaries:
        for what in HELD:
            assert summary[f"{what}_bytes"] >= summary[f"formula_{what}_bytes"] > 0
        held, formula = (sum(summary[f"{how}{what}_bytes"] for what in HELD) for how in ("", "formula_"))
        assert held == formula + summary["padding_bytes"]
    padding = sum(summary["padding_bytes"] for summary in summaries)
    assert (padding > 0) == (world_size == 3)  # the tiny GPT's sizes are even
    if name in OURS:  # FSDP2 pads rows, and test_fsdp.py counts them
        assert padding < 0.01 * summaries[0]["parameters_bytes"] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_stage_shards_one_more_kind_of_tensor(world_size):
    by_name = {name: summaries[0] for name, summaries in everyones_summaries(world_size).items()}
    full = by_name["zero1"]["formula_parameters_bytes"]
    for stage, name in enumerate(OURS, start=1):
        for what, first_stage, times in zip(HELD, (3, 2, 1), (1, 1, 2), strict=True):  # AdamW keeps two
            share = times * full / (world_size if stage >= first_stage else 1)
            assert by_name[name][f"{what}_bytes"] == pytest.approx(share, rel=2e-3), (name, what)


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_one_and_two_ranks_every_stage_ends_with_the_bits_of_plain_data_parallelism(world_size):
    # a + b is b + a, both are halved exactly, and AdamW does not care how parameters are cut.
    summaries = everyones_summaries(world_size)
    for name in SCRIPTS:
        assert_same(summaries[name][0]["weights"], summaries["naive"][0]["weights"], 0, f"{name}, parameter")


def test_three_ranks_end_close_to_one_with_momentum_clipping_and_microbatches():
    settings: dict[str, Any] = {"steps": 2, "optimizer": "momentum", "lr": 0.02, "clip": 0.5}

    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        return {name: train(cluster, name, grad_acc_steps=2, **settings) for name in SCRIPTS}

    [alone] = run_ranks(lambda cluster: train(cluster, "zero1", **settings), 1)
    for name, summary in run_ranks(work, 3)[0].items():
        assert_same(summary["weights"], alone["weights"], 1e-5, f"{name}, parameter")
        for what in ("bytes", "messages"):
            assert summary[f"{what}_sent"] == summary[f"{what}_formula"], name


def test_microbatches_add_traffic_in_stages_2_and_3_but_not_in_stage_1():
    def work(cluster: Cluster) -> dict[str, list[int]]:
        return {
            name: [train(cluster, name, steps=1, grad_acc_steps=n)["bytes_sent"] for n in (1, 3)]
            for name in OURS
        }

    for by_name in run_ranks(work, 2):
        # Reductions and gathers: 1 and 1 for stage 1 as before, 3 and 1 for stage 2; all of stage 3.
        for name, times in (("zero1", 1), ("zero2", 4 / 2), ("zero3", 3)):
            full, in_parts = by_name[name]
            assert in_parts == pytest.approx(times * full, rel=0.02), name


def test_bf16_and_recomputation_save_memory_and_gathered_blocks_save_traffic():
    ways: list[dict[str, Any]] = [{}, {"recompute": True}, {"bf16": True}, {"reshard_after_forward": False}]

    def work(cluster: Cluster) -> list[dict[str, Any]]:
        return [train(cluster, "zero3", steps=3, **way) for way in ways]

    for summaries in run_ranks(work, 2):
        plain, recomputed, half, kept = summaries
        assert recomputed["activations_bytes"] < 0.6 * plain["activations_bytes"]
        assert half["activations_bytes"] < 0.7 * plain["activations_bytes"]
        assert half["bytes_sent"] < 0.55 * plain["bytes_sent"]
        assert kept["bytes_sent"] < 0.95 * plain["bytes_sent"]
        assert recomputed["replica_digest"] == kept["replica_digest"] == plain["replica_digest"]
        assert 0 < abs(half["last_loss"] / plain["last_loss"] - 1) < 0.02
        for summary in summaries:
            assert summary["bytes_sent"] == summary["bytes_formula"]
            assert summary["replicas_equal"] is True
            for what in HELD:
                assert summary[f"{what}_bytes"] == summary[f"formula_{what}_bytes"], what


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("zero2", {"clip": 0.0}, ["--clip 0", "above 0"]),
    ("zero2", {"bucket_mb": 0.0}, ["--bucket-mb"]),
    ("zero3", {"grad_acc_steps": 5}, ["--grad-acc-steps", "6 examples"]),
]


def test_invalid_arguments_are_refused_in_one_sentence():
    def work(cluster: Cluster) -> list[str]:
        return [refusal(cluster, name, **changes) for name, changes, _ in REFUSED]

    for (_, _, words), *texts in zip(REFUSED, *run_ranks(work, 2), strict=True):
        sentence = the_one_sentence(texts)
        assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("name", SCRIPTS)
def test_zero_scripts_offer_no_metronome(name, capsys):
    _, args, _ = SCRIPTS[name]
    with pytest.raises(SystemExit):
        tyro.cli(args, args=["--metronome", "5ms"])
    assert "Unrecognized options: --metronome" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tyro.cli(args, args=["--help"])
    assert "--metronome" not in capsys.readouterr().out
    assert tyro.cli(args, args=["--clip", "1"]).clip == 1.0


def test_a_trace_shows_gathers_and_reductions_beside_compute(tmp_path: Path):
    run_ranks(lambda cluster: train(cluster, "zero3", steps=3, link="1gbit", trace=str(tmp_path)), 2)
    kinds = {row["cat"] for row in rows_of(tmp_path) if row["ph"] == "X"}
    assert {"forward", "backward", "communication", "optimizer", "launch"} <= kinds
