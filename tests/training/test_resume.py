"""A run resumes from its checkpoint with the same bits, stops when it is asked to, or says why not."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lab.cluster import Cluster
from lab.launch.errors import Complete
from lab.models.model import SIZES
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks
from tests.refusals import the_one_sentence
from tests.training.attempts import STEPS, interrupted, refusal, train
from training.checkpoint import MANIFEST
from training.run import Run

NAIVE = "data_parallel_naive"


def test_after_ctrl_c_on_one_rank_all_stop_after_the_same_step_and_resume_with_the_same_bits(tmp_path):
    dropping = mock.patch.dict(SIZES, tiny=dataclasses.replace(SIZES["tiny"], dropout=0.5))

    def work(cluster: Cluster) -> list[str]:
        sentences = []
        for mode, where, at, last_step in ((NAIVE, "batch", 3, 3), ("zero1", "record", 2, 2)):
            folder = tmp_path / mode
            with dropping:
                sentences.append(interrupted(cluster, mode, where, at, 1, checkpoint=str(folder)))
                assert os.listdir(folder) == [f"step-{last_step}"]
                resumed = train(cluster, mode, checkpoint=str(folder), resume=True)
                assert resumed["replica_digest"] == train(cluster, mode)["replica_digest"]
            assert resumed["steps"] == STEPS - last_step
            assert resumed["bytes_sent"] == resumed["bytes_formula"]
            assert sentences[-1].startswith(f"130: stopped after step {last_step} of {STEPS};")
            assert str(folder) in sentences[-1]
        return sentences

    for texts in zip(*run_ranks(work, 2), strict=True):
        the_one_sentence(texts)
    assert os.listdir(tmp_path / NAIVE) == [f"step-{STEPS}"]


def test_a_mesh_resumes_a_run_with_the_same_experts_and_no_other(tmp_path):
    own = {"experts": 4, "top_k": 2}

    def work(cluster: Cluster) -> str:
        train(cluster, "expert_parallel", checkpoint=str(tmp_path), steps=1, **own)
        on = {"checkpoint": str(tmp_path), "steps": 2, "resume": True, "layers": 2}
        assert train(cluster, "hybrid", **on, **own)["steps"] == 1
        return refusal(cluster, "hybrid", **on | {"steps": 3, "experts": 4, "top_k": 1})

    sentence = the_one_sentence(run_ranks(work, 2))
    assert "'top_k': 2" in sentence and "'top_k': 1" in sentence


@on_ranks(2)
def test_the_same_command_starts_resumes_after_sigusr1_and_sees_that_all_is_done(cluster: Cluster, tmp_path):
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "new"), "auto_resume": True}
    said = interrupted(cluster, NAIVE, "batch", 3, 1, signal.SIGUSR1, **settings)
    assert said.startswith("75: stopped after step 3 of ")
    resumed, straight = train(cluster, NAIVE, **settings), train(cluster, NAIVE)
    assert resumed["steps"] == STEPS - 3
    assert resumed["replica_digest"] == straight["replica_digest"]
    with pytest.raises(Complete, match=f"checkpoint of all {STEPS} steps; nothing is left") as complete:
        train(cluster, NAIVE, **settings)
    assert complete.value.exit_code == 0


@on_ranks(2)
def test_ctrl_c_in_the_last_step_lets_the_run_end_with_its_report(cluster: Cluster, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    for where, at in (("batch", 2), ("record", 2), ("finish", 1)):
        folder = str(tmp_path / where)
        assert interrupted(cluster, NAIVE, where, at, 1, steps=2, checkpoint=folder) == ""
        assert signal.getsignal(signal.SIGINT) == before
        assert os.listdir(folder) == ["step-2"]


def test_a_checkpoint_that_is_missing_damaged_complete_or_of_other_arguments_is_refused_by_all_ranks(
    tmp_path,
):
    manifest = tmp_path / "step-2" / MANIFEST
    others: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "'seed': 1"),
        ({"batch_size": 24}, "'batch_size': 24"),
        ({"lr": 1e-2}, "'lr': 0.01"),
        ({"size": "small"}, "128"),
        ({"model": "baby_cnn"}, "cnn"),
    ]

    def work(cluster: Cluster) -> list[str]:
        def refused(**changes: Any) -> str:
            here = {"checkpoint": str(tmp_path), "steps": 3, "resume": True} | changes
            return refusal(cluster, "data_parallel_ddp", **here)

        missing = refused()
        train(cluster, NAIVE, checkpoint=str(tmp_path), steps=2)
        here = {"checkpoint": str(tmp_path), "steps": 2}
        said = [missing, refused(steps=2), refusal(cluster, NAIVE, **here)]
        return said + [refused(**changes) for changes, _ in others]

    def damaged(cluster: Cluster) -> list[str]:
        here = {"checkpoint": str(tmp_path), "steps": 3}
        return [refusal(cluster, NAIVE, **here, **{how: True}) for how in ("resume", "auto_resume")]

    missing, complete, not_resumed, *said = map(the_one_sentence, zip(*run_ranks(work, 2), strict=True))
    assert "no checkpoint" in missing and "2 steps already" in complete
    assert "from which this run has not started: resume from it, or name another folder" in not_resumed
    for sentence, (_, words) in zip(said, others, strict=True):
        assert sentence.startswith("The checkpoint was made with ") and words in sentence
    manifest.write_text(manifest.read_text()[:-9])
    for texts in zip(*run_ranks(damaged, 2), strict=True):
        assert f"{manifest} is damaged" in the_one_sentence(texts)
    assert os.listdir(tmp_path) == ["step-2"]


def test_a_checkpoint_that_cannot_be_written_is_refused_before_a_step_is_taken(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(cluster: Cluster) -> list[str]:
        folders: list[tuple[Path, dict[str, Any]]] = [
            (tmp_path / "file", {}),
            (tmp_path / "file" / "folder", {}),
            (tmp_path / "typo", {"resume": True}),
        ]
        with mock.patch.object(Run, "batch", side_effect=AssertionError("trained")):
            return [refusal(cluster, NAIVE, checkpoint=str(folder), **how) for folder, how in folders]

    file, below, typo = map(the_one_sentence, zip(*run_ranks(work, 3), strict=True))
    for sentence in (file, below):
        assert sentence.startswith(f"--checkpoint {tmp_path / 'file'}")
        assert sentence.endswith("name another folder.")
    assert f"no checkpoint in {tmp_path / 'typo'} to resume from" in typo
    assert os.listdir(tmp_path) == ["file"]
