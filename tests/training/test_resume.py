"""A run resumes from its checkpoint with the same bits, stops when it is asked to, or says why not."""

import functools
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from comm.collectives import all_reduce
from lab.cluster import Cluster
from lab.launch.errors import Complete
from lab.ranks import run_ranks
from tests.training.attempts import STEPS, interrupted, refusal, the_one_sentence, train
from training import checkpoint_storage as storage
from training.checkpoint import claim
from training.run import Run

NAIVE, OVERLAP, BUCKETS = "data_parallel_naive", "data_parallel_overlap", "data_parallel_bucket_overlap"


@functools.cache
def at_once(mode: str, world_size: int) -> dict[str, Any]:
    return run_ranks(train, world_size, mode)[0]


@pytest.mark.parametrize(
    ("mode", "world_size", "where", "at", "last_step"),
    [
        (NAIVE, 2, "batch", 3, 3),
        (OVERLAP, 2, "step", 2, 2),
        (BUCKETS, 3, "expect_traffic", 3, 3),
        ("data_parallel_ddp", 2, "batch", 2, 2),
    ],
)
def test_after_ctrl_c_on_one_rank_all_stop_after_the_same_step_and_resume_with_the_same_bits(
    tmp_path, mode, world_size, where, at, last_step
):
    def work(cluster: Cluster) -> tuple[str, str]:
        said = interrupted(cluster, mode, where, at, world_size - 1, checkpoint=str(tmp_path))
        assert os.listdir(tmp_path) == [f"step-{last_step}"]
        resumed = train(cluster, mode, checkpoint=str(tmp_path), resume=True)
        assert resumed["steps"] == STEPS - last_step
        assert resumed["bytes_sent"] == resumed["bytes_formula"]
        return said, resumed["replica_digest"]

    [(said, resumed)] = set(run_ranks(work, world_size))
    assert said.startswith(f"130: stopped after step {last_step} of {STEPS};")
    assert str(tmp_path) in said and "\n" not in said
    assert resumed == at_once(mode, world_size)["replica_digest"]
    assert os.listdir(tmp_path) == [f"step-{STEPS}"]


def test_another_lesson_on_another_number_of_ranks_resumes_a_run(tmp_path):
    ways: list[tuple[str, int, dict[str, Any]]] = [
        (BUCKETS, 1, {}),
        ("data_parallel_ddp", 3, {}),
        ("hybrid", 4, {"tensor": 2, "zero": 3, "layers": 2}),
        (NAIVE, 2, {}),
        ("hybrid", 2, {"pipeline": 2, "microbatches": 2, "layers": 2}),
    ]
    for steps, (mode, world_size, own) in enumerate(ways, start=1):
        here = {"checkpoint": str(tmp_path), "steps": steps} | own | ({"resume": True} if steps > 1 else {})
        last = run_ranks(lambda cluster, mode=mode, here=here: train(cluster, mode, **here), world_size)[0]
        assert last["steps"] == 1
    straight = run_ranks(lambda cluster: train(cluster, NAIVE, steps=len(ways)), 1)[0]
    for loss in ("last_loss", "validation_loss"):
        assert last[loss] == pytest.approx(straight[loss], rel=1e-4)


def test_the_same_command_starts_resumes_after_sigusr1_and_sees_that_all_is_done(tmp_path):
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "new"), "auto_resume": True}

    def work(cluster: Cluster) -> tuple[str, int, bool, str, int]:
        said = interrupted(cluster, NAIVE, "batch", 3, 1, signal.SIGUSR1, **settings)
        resumed, straight = train(cluster, NAIVE, **settings), train(cluster, NAIVE)
        with pytest.raises(Complete) as complete:
            train(cluster, NAIVE, **settings)
        is_equal = resumed["replica_digest"] == straight["replica_digest"]
        return said, resumed["steps"], is_equal, str(complete.value), complete.value.exit_code

    [(said, steps, is_equal, end, exit_code)] = set(run_ranks(work, 2))
    assert said.startswith("75: stopped after step 3 of ") and steps == STEPS - 3 and is_equal
    sentence = f"{tmp_path / 'new'} has a checkpoint of all {STEPS} steps; nothing is left."
    assert (end, exit_code) == (sentence, 0)


@pytest.mark.parametrize("where", ["batch", "expect_traffic", "finish"])
def test_ctrl_c_in_the_last_step_lets_the_run_end_with_its_report(tmp_path, where):
    def work(cluster: Cluster) -> str:
        before = signal.getsignal(signal.SIGINT)
        at = 1 if where == "finish" else 2
        said = interrupted(cluster, NAIVE, where, at, 1, steps=2, checkpoint=str(tmp_path))
        assert signal.getsignal(signal.SIGINT) == before
        return said

    assert run_ranks(work, 2) == ["", ""]
    assert os.listdir(tmp_path) == ["step-2"]


def test_ranks_ask_each_other_to_stop_only_where_there_is_a_checkpoint_and_outside_of_the_steps(tmp_path):
    def work(cluster: Cluster) -> list[tuple[int, int]]:
        found = []
        for options in ({}, {"checkpoint": str(tmp_path)}):
            with mock.patch("training.run.all_reduce", side_effect=all_reduce) as reductions:
                summary = train(cluster, NAIVE, steps=3, **options)
            found.append((reductions.call_count - 3, summary["bytes_sent"]))  # 3 of the loss
        return found

    for (asked, sent), (asked_with_checkpoint, sent_with_checkpoint) in run_ranks(work, 2):
        assert (asked, asked_with_checkpoint) == (0, 2)  # the last step ends the run anyway
        assert sent == sent_with_checkpoint


def test_a_checkpoint_of_other_arguments_is_refused_by_all_ranks(tmp_path):
    here = {"checkpoint": str(tmp_path), "steps": 2}
    others = [{"seed": 1}, {"batch_size": 24}, {"lr": 1e-2}, {"size": "small"}]

    def work(cluster: Cluster) -> list[str]:
        train(cluster, NAIVE, **here)
        return [
            *(refusal(cluster, NAIVE, **here | change | {"resume": True}) for change in others),
            refusal(cluster, "data_parallel_ddp", **here, model="baby_cnn", resume=True),
            refusal(cluster, NAIVE, **here),
        ]

    *said, not_resumed = map(the_one_sentence, zip(*run_ranks(work, 2), strict=True))
    for sentence, words in zip(
        said, ["'seed': 1", "'batch_size': 24", "'lr': 0.01", "128", "cnn"], strict=True
    ):
        assert sentence.startswith("The checkpoint was made with ") and words in sentence
    assert "from which this run has not started: resume from it, or name another folder" in not_resumed
    assert os.listdir(tmp_path) == ["step-2"]


def test_a_checkpoint_that_is_missing_damaged_or_complete_is_refused_by_all_ranks(tmp_path):
    def attempt(cluster: Cluster, how: str = "resume", steps: int = 2) -> str:
        return refusal(cluster, NAIVE, steps=steps, checkpoint=str(tmp_path), **{how: True})

    assert "no checkpoint" in the_one_sentence(run_ranks(attempt, 2))
    run_ranks(lambda cluster: train(cluster, NAIVE, steps=2, checkpoint=str(tmp_path)), 2)
    assert "2 steps already" in the_one_sentence(run_ranks(attempt, 2))
    path = tmp_path / "step-2" / storage.MANIFEST
    path.write_text(path.read_text()[:-9])
    for how in ("resume", "auto_resume"):
        assert f"{path} is damaged" in the_one_sentence(run_ranks(attempt, 2, how, 3))
    assert os.listdir(tmp_path) == ["step-2"]


def test_a_checkpoint_that_cannot_be_written_is_refused_before_a_step_is_taken(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken").mkdir()
    claim(tmp_path / "taken")  # by this process, as by another job

    def work(cluster: Cluster) -> list[str]:
        folders: list[tuple[Path, dict[str, Any]]] = [
            (tmp_path / "file", {}),
            (tmp_path / "file" / "folder", {}),
            (tmp_path / "taken", {}),
            (tmp_path / "typo", {"resume": True}),
        ]
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return [refusal(cluster, NAIVE, checkpoint=str(folder), **how) for folder, how in folders]

    file, below, taken, typo = map(the_one_sentence, zip(*run_ranks(work, 3), strict=True))
    for sentence in (file, below):
        assert sentence.startswith(f"--checkpoint {tmp_path / 'file'}")
        assert sentence.endswith("name another folder.")
    assert f"another job saves its checkpoints in {tmp_path / 'taken'}" in taken
    assert f"no checkpoint in {tmp_path / 'typo'} to resume from" in typo
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]
