"""With --auto-resume the same command starts a run, goes on with it, and sees that it is complete."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import Complete
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import STEPS, train
from tests.training.attempts import interrupted, refusal, the_one_sentence
from tests.zero.test_zero_scripts import known


@pytest.mark.parametrize("name", ["naive", "zero1"])
def test_the_same_command_starts_goes_on_after_sigusr1_and_sees_that_all_is_done(tmp_path, name):
    """naive saves one file, and zero1 a folder of several."""
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "new"), "auto_resume": True}

    def work(cluster: Cluster) -> tuple[str, int, bool, str, int]:
        with known():
            said = interrupted(cluster, name, "batch", 3, 1, signal.SIGUSR1, **settings)
            resumed, at_once = train(cluster, name, **settings), train(cluster, name)
            with pytest.raises(Complete) as complete:
                train(cluster, name, **settings)
        is_equal = resumed["replica_digest"] == at_once["replica_digest"]
        return said, resumed["steps"], is_equal, str(complete.value), complete.value.exit_code

    [(said, steps, is_equal, end, exit_code)] = set(run_ranks(work, 2))
    assert said.startswith("75: stopped after step 3 of ") and steps == STEPS - 3 and is_equal
    assert (end, exit_code) == (
        f"{tmp_path / 'new'} has a checkpoint of all {STEPS} steps; nothing is left.",
        0,
    )


def test_what_a_killed_job_has_left_half_written_is_no_checkpoint(tmp_path):
    for name in ("checkpoint.pt.partial-01234567", "checkpoint-3.partial-01234567", "other"):
        (tmp_path / name).touch()
        assert not checkpoint.exists(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    assert checkpoint.exists(tmp_path)


def test_a_damaged_checkpoint_is_refused_and_not_replaced_by_a_new_run(tmp_path):
    damaged = tmp_path / checkpoint.NAME
    damaged.write_bytes(b"no checkpoint")

    def attempt(cluster: Cluster, folder: Path) -> str:
        return refusal(cluster, "naive", checkpoint=str(folder), auto_resume=True)

    assert "damaged" in the_one_sentence(run_ranks(attempt, 2, tmp_path))
    assert os.listdir(tmp_path) == [checkpoint.NAME] and damaged.read_bytes() == b"no checkpoint"


def test_checkpoints_of_the_hybrid_training_are_refused_by_name_and_stay_alone(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "manifest").touch()

    def attempts(cluster: Cluster, folder: Path) -> set[str]:
        ways: list[dict[str, Any]] = [{}, {"resume": True}, {"auto_resume": True}]
        return {refusal(cluster, "naive", checkpoint=str(folder), **way) for way in ways}

    [(said,)] = {tuple(found) for found in run_ranks(attempts, 2, tmp_path)}
    assert said.startswith(f"{tmp_path} holds step-3, a checkpoint of the hybrid training")
    assert os.listdir(tmp_path) == ["step-3"]
