"""A run goes on from its checkpoint; one that is missing, damaged or of another run is refused."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import STEPS, everyones_summaries, train
from tests.training.attempts import refusal, the_one_sentence
from training.arguments import Args
from training.full_state_checkpoint import FullState
from training.run import Run

CASES = [("naive", 2), ("overlap", 2), ("bucket", 2), ("bucket", 3), ("ddp", 2)]


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_a_run_in_two_parts_ends_with_the_bits_of_one_in_one_go(tmp_path, name, world_size):
    def work(cluster: Cluster) -> tuple[str, str]:
        half = train(cluster, name, steps=STEPS // 2, checkpoint=str(tmp_path))
        resumed = train(cluster, name, checkpoint=str(tmp_path), resume=True)
        assert half["steps"] + resumed["steps"] == STEPS
        assert resumed["bytes_sent"] == resumed["bytes_formula"]
        return half["replica_digest"], resumed["replica_digest"]

    [(half, resumed)] = set(run_ranks(work, world_size))
    at_once = everyones_summaries(world_size)[name][0]["replica_digest"]
    assert resumed == at_once != half
    assert os.listdir(tmp_path) == [checkpoint.NAME]
    assert checkpoint.unpack(checkpoint.read(tmp_path), "")["step"] == STEPS


def test_no_rank_goes_on_before_the_checkpoint_is_on_disk():
    def slowly(*args: Any) -> Path:
        time.sleep(0.5)
        return save(*args)

    def work(cluster: Cluster, folder: str) -> bool:
        state = FullState(get=dict, put=lambda _: None)
        with mock.patch.object(checkpoint, "save", slowly):
            state.save(cluster, folder, {"step": 1})
        return (Path(folder) / checkpoint.NAME).exists()

    save = checkpoint.save
    with tempfile.TemporaryDirectory() as folder:
        assert all(run_ranks(work, 3, folder))


def test_another_number_of_ranks_can_go_on(tmp_path):
    def work(cluster: Cluster, steps: int, resume: bool) -> float:
        return train(cluster, "bucket", steps=steps, checkpoint=str(tmp_path), resume=resume)["last_loss"]

    for world_size, steps in [(1, 2), (3, 4), (2, STEPS)]:
        last = run_ranks(work, world_size, steps, steps > 2)[0]
    assert last == pytest.approx(everyones_summaries(1)["bucket"][0]["last_loss"], rel=1e-4)


def test_a_checkpoint_of_other_arguments_or_another_lesson_is_refused_by_all_ranks(tmp_path):
    here = {"checkpoint": str(tmp_path), "steps": 2}
    others = [("naive", {"seed": 1}), ("naive", {"batch_size": 24}), ("naive", {"lr": 1e-2})]
    others += [("naive", {"size": "small"}), ("overlap", {}), ("cnn", {})]

    def work(cluster: Cluster) -> list[str]:
        train(cluster, "naive", **here)
        return [refusal(cluster, name, **here | change | {"resume": True}) for name, change in others]

    for (name, change), *texts in zip(others, *run_ranks(work, 2), strict=True):
        sentence = the_one_sentence(texts)
        assert all(f"{key!r}: {value!r}" in sentence for key, value in change.items())
        assert name == "naive" or "data_parallel_naive" in sentence
    assert os.listdir(tmp_path) == [checkpoint.NAME]


def test_a_checkpoint_that_is_missing_damaged_or_complete_is_refused_by_all_ranks(tmp_path):
    def attempt(cluster: Cluster) -> str:
        return refusal(cluster, "naive", steps=2, checkpoint=str(tmp_path), resume=True)

    assert "no checkpoint" in the_one_sentence(run_ranks(attempt, 2, timeout=30))
    run_ranks(lambda cluster: train(cluster, "naive", steps=2, checkpoint=str(tmp_path)), 2)
    assert "2 steps already" in the_one_sentence(run_ranks(attempt, 2, timeout=30))
    whole = (tmp_path / checkpoint.NAME).read_bytes()
    for left in (0, len(whole) // 2, len(whole) - 1):
        (tmp_path / checkpoint.NAME).write_bytes(whole[:left])
        assert "damaged" in the_one_sentence(run_ranks(attempt, 2, timeout=30))
    assert os.listdir(tmp_path) == [checkpoint.NAME]


def test_a_checkpoint_that_cannot_be_written_is_refused_before_a_step_is_taken(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(cluster: Cluster) -> list[str]:
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return [
                refusal(cluster, "naive", checkpoint=str(tmp_path / "file")),
                refusal(cluster, "naive", checkpoint=str(tmp_path / "file" / "folder")),
                refusal(cluster, "naive", checkpoint=str(tmp_path / "typo"), resume=True),
            ]

    file, below, typo = map(the_one_sentence, zip(*run_ranks(work, 3), strict=True))
    for sentence in (file, below):
        assert sentence.startswith(f"--checkpoint {tmp_path / 'file'}")
        assert sentence.endswith("name another folder.")
    assert f"no checkpoint in {tmp_path / 'typo'} to resume from" in typo
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_in_which_another_job_saves_is_refused_before_a_step_is_taken(tmp_path):
    checkpoint.claim(tmp_path)  # by this process

    def work(cluster: Cluster) -> str:
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return refusal(cluster, "naive", checkpoint=str(tmp_path))

    assert f"another job saves its checkpoints in {tmp_path}" in the_one_sentence(run_ranks(work, 2))


def edited(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state, and the optimizer's, with each of its values left out, or replaced by another."""
    for key in state:
        yield {name: value for name, value in state.items() if name != key}
        yield from (state | {key: value} for value in (None, -1, "some", {"some": 1}))
        if key == "optimizer":
            yield from (state | {key: below} for below in edited(state[key]))


def test_an_edited_checkpoint_is_refused_in_a_sentence(tmp_path):
    def work(cluster: Cluster) -> list[str]:
        train(cluster, "naive", steps=1, checkpoint=str(tmp_path))
        state = checkpoint.unpack(checkpoint.read(tmp_path), "")
        run = Run(cluster, Args(size="tiny", steps=2, checkpoint=str(tmp_path), resume=True), "edited")
        model = run.model()
        optimizer = run.optimizer(model)
        said = []
        for one in edited(state):
            if cluster.is_main:
                checkpoint.save(tmp_path, one)
            try:
                run._checkpoint.load(run.state(model, optimizer), all_steps=2)
            except WorkbookError as error:
                said.append(str(error))
        return said

    first, other = run_ranks(work, 2)
    assert first == other and len(first) > 20
    assert all("checkpoint" in sentence and "\n" not in sentence for sentence in first)
