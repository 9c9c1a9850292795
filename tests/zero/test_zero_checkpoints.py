"""The scripts of ZeRO go on from each other's checkpoints, and refuse those that do not fit."""

import errno
import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import STEPS
from tests.training import attempts
from tests.training.attempts import the_one_sentence
from tests.zero.test_zero_scripts import everyones_summaries, known, refusal, train
from training.run import Run


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_run(tmp_path):
    def work(cluster: Cluster) -> list[str]:
        digests = []
        for name in ("zero2", "zero3", "fsdp"):
            folder = {"checkpoint": str(tmp_path / name)}
            train(cluster, name, steps=STEPS // 2, **folder)
            digests.append(train(cluster, name, resume=True, **folder)["replica_digest"])
        return digests

    for resumed in run_ranks(work, 2):
        names = ("zero2", "zero3", "fsdp")
        assert resumed == [everyones_summaries(2)[name][0]["replica_digest"] for name in names]


def test_fsdp2_resumes_from_our_checkpoint_and_we_from_its_on_another_number_of_ranks(tmp_path):
    folder = {"checkpoint": str(tmp_path)}
    settings: dict[str, Any] = {"optimizer": "momentum", "lr": 0.02}

    def part(cluster: Cluster, name: str, steps: int) -> dict[str, Any]:
        return train(cluster, name, steps=steps, resume=steps > 2, **folder, **settings)

    for world_size, name, steps in ((2, "zero1", 2), (3, "fsdp", 4), (2, "zero3", STEPS)):
        last = run_ranks(part, world_size, name, steps)[0]  # 3 ranks: no tensor's rows divide
    [unbroken] = run_ranks(lambda cluster: train(cluster, "zero1", **settings), 1)
    assert_same(last["weights"], unbroken["weights"], 1e-4, "parameter")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_the_ranks_do_not_share_is_refused_before_a_step_is_taken(tmp_path, resume):
    def work(cluster: Cluster) -> list[str]:
        own = tmp_path / str(cluster.rank)
        (own / "run").mkdir(parents=True)
        os.chdir(own)
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return [refusal(cluster, name, checkpoint="run", resume=resume) for name in ("zero1", "fsdp")]

    for sentence in map(the_one_sentence, zip(*run_ranks(work, 3), strict=True)):
        assert sentence.startswith("--checkpoint run: rank 1 does not see what rank 0 writes there; ")
        assert sentence.endswith("name a folder that all machines share.")
    assert not list(tmp_path.glob("*/run/*"))


def test_a_folder_in_which_one_rank_cannot_write_is_refused_before_a_step_is_taken(tmp_path):
    def work(cluster: Cluster) -> str:
        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        patched = mock.patch("tempfile.TemporaryFile", full) if cluster.rank == 1 else nullcontext()
        with patched, mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return refusal(cluster, "zero3", checkpoint=str(tmp_path))

    sentence = the_one_sentence(run_ranks(work, 2))
    assert sentence.startswith(f"--checkpoint {tmp_path}: rank 1 cannot write there (Disk quota exceeded)")


def test_a_run_stopped_by_ctrl_c_in_stage_1_on_three_ranks_resumes_in_stage_3_on_two(tmp_path):
    settings: dict[str, Any] = {"optimizer": "momentum", "lr": 0.05, "clip": 1.0}

    def stop(cluster: Cluster) -> str:
        with known():
            at = {"where": "step", "at": 3, "rank": 2, "checkpoint": str(tmp_path)}
            return attempts.interrupted(cluster, "zero1", **at, **settings)

    def go_on(cluster: Cluster) -> dict[str, Any]:
        return train(cluster, "zero3", checkpoint=str(tmp_path), resume=True, **settings)

    [said] = set(run_ranks(stop, 3))
    assert said.startswith(f"130: stopped after step 3 of {STEPS};")
    ended, _ = run_ranks(go_on, 2)
    unbroken, *_ = run_ranks(lambda cluster: train(cluster, "zero1", **settings), 3)
    assert (ended["steps"], ended["replicas_equal"]) == (3, True)
    assert ended["first_loss"] < unbroken["first_loss"]
    assert_same(ended["weights"], unbroken["weights"], 1e-4, "parameter")


def test_a_checkpoint_that_does_not_fit_the_run_is_refused_by_all_ranks(tmp_path):
    here = {"checkpoint": str(tmp_path), "steps": 2}
    misfits: list[tuple[str, dict[str, Any], str]] = [
        ("zero1", {"seed": 1}, "'seed': 1"),
        ("zero3", {"seed": 1}, "'seed': 1"),
        ("zero2", {"optimizer": "sgd", "steps": 4}, "another optimizer"),
        ("zero3", {"size": "small", "steps": 4}, "another model"),
        ("zero3", {}, "2 steps already"),
        ("zero1", {"checkpoint": str(tmp_path / "nothing")}, "no checkpoint"),
    ]

    def work(cluster: Cluster) -> list[str]:
        train(cluster, "zero1", **here)
        return [refusal(cluster, name, **here | change | {"resume": True}) for name, change, _ in misfits]

    for (_, _, words), *texts in zip(misfits, *run_ranks(work, 2), strict=True):
        assert words in the_one_sentence(texts)
    assert os.listdir(tmp_path) == ["checkpoint-1"]
