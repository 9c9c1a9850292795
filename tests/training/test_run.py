"""Arguments that make no sense, checkpoints, Ctrl-C: what training.run does for all train scripts."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lab import checkpoint, timeline
from lab.cluster import Cluster
from lab.errors import Stopped, WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import STEPS, everyones_summaries, train
from training.arguments import Args
from training.run import Run

ROOT = Path(__file__).resolve().parents[2]


def refusal(cluster: Cluster, name: str, **changes: Any) -> str:
    """Return why a script refuses these arguments; "" if it does not, or with a traceback."""
    try:
        train(cluster, name, **({"steps": 1} | changes))
    except WorkbookError as error:
        return str(error)
    except (ArithmeticError, RuntimeError, ValueError):
        return ""
    return ""


def the_one_sentence(texts: Iterable[str]) -> str:
    """Return what every rank says."""
    [text] = set(texts)
    assert text and "\n" not in text
    return text


# Script, arguments, and what the sentence must name.
NONSENSE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("naive", {"steps": 0}, ["--steps 0"]),
    ("naive", {"steps": -3}, ["--steps -3"]),
    ("naive", {"batch_size": 13}, ["--batch-size 13: 2 ranks", "such as 14."]),
    ("naive", {"batch_size": 10**30}, ["--batch-size 1000", "at most 1048576 examples"]),
    ("naive", {"steps": 10**30}, ["--steps 1000", "at most 1000000000"]),
    ("overlap", {"metronome": "9" * 400 + "s"}, ["--metronome 999", "more than a week"]),
    ("accumulation", {"grad_acc_steps": 5}, ["--grad-acc-steps", "6 examples"]),
    ("bucket", {"grad_acc_steps": 12}, ["--grad-acc-steps", "6 examples"]),
    ("naive", {"link": "fast"}, ["--link fast", "1gbit"]),
    ("naive", {"link": "1gbit,5"}, ["--link 1gbit,5", "2ms"]),
    ("naive", {"metronome": "5"}, ["--metronome 5", "2ms"]),
    ("cnn", {"metronome": "5ms"}, ["--metronome"]),
    ("naive", {"resume": True}, ["--checkpoint"]),
    ("accumulation", {"grad_acc_steps": 0}, ["--grad-acc-steps"]),
    ("overlap", {"grad_acc_steps": -1}, ["--grad-acc-steps"]),
    ("bucket", {"bucket_mb": 0.0}, ["--bucket-mb"]),
    ("bucket", {"bucket_mb": -1.0}, ["--bucket-mb"]),
    ("ddp", {"bucket_mb": -1.0}, ["--bucket-mb"]),
    ("bucket", {"bucket_mb": math.inf}, ["--bucket-mb inf"]),
    ("ddp", {"bucket_mb": math.nan}, ["--bucket-mb nan"]),
    ("naive", {"lr": 0.0}, ["--lr 0"]),
    ("naive", {"lr": -0.1}, ["--lr -0.1"]),
    ("naive", {"lr": math.nan}, ["--lr nan"]),
    ("cnn", {"lr": math.inf}, ["--lr inf"]),
    ("naive", {"seed": -1}, ["--seed -1"]),
    ("naive", {"seed": 1 << 70}, ["--seed", "to 4294967295"]),
    ("naive", {"link": ""}, ["--link", "1gbit"]),
    ("naive", {"metronome": ""}, ["--metronome", "2ms"]),
    ("naive", {"checkpoint": ""}, ["--checkpoint", "folder"]),
    ("naive", {"trace": ""}, ["--trace", "folder"]),
    ("naive", {"trace": "/dev/null/traces"}, ["--trace /dev/null/traces", "another folder"]),
]


@functools.cache
def refusals() -> list[tuple[str, ...]]:
    """Return what each of two ranks says to every case, one case after the other in the same group."""

    def work(cluster: Cluster) -> list[str]:
        return [refusal(cluster, name, **changes) for name, changes, _ in NONSENSE]

    return list(zip(*run_ranks(work, 2, timeout=30), strict=True))


@pytest.mark.parametrize("case", range(len(NONSENSE)))
def test_arguments_that_make_no_sense_are_refused_in_a_sentence(case):
    sentence = the_one_sentence(refusals()[case])
    assert all(word in sentence for word in NONSENSE[case][2])


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("naive", {}, {"seed": 1}, "--seed is 0 on rank 0, 2 and 1 on rank 1"),
    ("bucket", {}, {"lr": 0.01}, "--lr is 0.003 on rank 0, 2 and 0.01 on rank 1"),
    ("overlap", {}, {"batch_size": 24}, "--batch-size is 12 on rank 0, 2 and 24 on rank 1"),
    ("ddp", {}, {"steps": 2}, "--steps is 1 on rank 0, 2 and 2 on rank 1"),
    (
        "naive",
        {},
        {"steps": 0},
        "--steps is 1 on rank 0, 2 and 0 on rank 1",
    ),  # rank 1 alone would refuse
    ("cnn", {}, {"bucket_mb": 0.2}, "--bucket-mb is unset on rank 0, 2 and 0.2 on rank 1"),
    ("naive", {}, {"checkpoint": "runs"}, "--checkpoint is unset on rank 0, 2 and runs on rank 1"),
    ("naive", {"name": "overlap"}, {}, "RUN_MODE is data_parallel_naive on rank 0, 2 and"),
]


def test_ranks_with_different_arguments_are_refused_before_a_step_is_taken_and_told_who_has_what():
    def work(cluster: Cluster) -> list[str]:
        said = []
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            for name, other, changes, _ in DIFFERENT:
                mine = {**other, **changes} if cluster.rank == 1 else {}
                said.append(refusal(cluster, mine.pop("name", name), **mine))
        return said

    for (*_, words), *texts in zip(DIFFERENT, *run_ranks(work, 3, timeout=30), strict=True):
        sentence = the_one_sentence(texts)
        assert sentence.startswith(words)
        assert sentence.endswith(": start all ranks with the same arguments")


def test_only_rank_0_may_be_asked_for_json():
    run_ranks(lambda cluster: train(cluster, "naive", steps=1, json=cluster.is_main), 2)


def test_replicas_that_end_unequal_are_an_error_after_the_report(capfd):
    def work(cluster: Cluster) -> str:
        def drifting(self: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (cluster.rank == 1)))

        with mock.patch.object(Run, "optimizer", drifting):
            return refusal(cluster, "naive", json=True)

    sentence = the_one_sentence(run_ranks(work, 3))
    assert "replicas are not equal after the last step (rank 1 differs from rank 0)" in sentence
    line = capfd.readouterr().out.splitlines()[-1]
    assert json.loads(line[line.index("{") :])["replicas_equal"] is False


def test_a_trace_that_cannot_be_written_is_refused_before_a_step_is_taken(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(cluster: Cluster) -> str:
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return refusal(cluster, "naive", trace=str(tmp_path / "file"))

    assert "--trace" in the_one_sentence(run_ranks(work, 3))


@pytest.mark.parametrize("model", ["gpt", "baby_cnn"])
def test_the_slices_of_all_ranks_are_the_batch_of_one(model):
    def work(cluster: Cluster) -> tuple[torch.Tensor, torch.Tensor]:
        return Run(cluster, Args(size="tiny", batch_size=12), "batches", model).batch(3)

    [whole] = run_ranks(work, 1)
    slices = run_ranks(work, 3)
    for i in range(2):
        assert torch.equal(torch.cat([parts[i] for parts in slices]), whole[i])


def test_a_long_run_records_its_first_steps_only_and_counts_them_all():
    def work(cluster: Cluster) -> tuple[dict[str, Any], int]:
        with mock.patch("training.run.WATCHED", 4):
            summary = train(cluster, "bucket", steps=9)
        return summary, [event.name for event in timeline.recorded()].count("forward")

    for summary, num_recorded in run_ranks(work, 2):
        assert (summary["steps"], summary["observed_steps"]) == (9, 2)  # two more are warm-up
        assert summary["bytes_sent"] == summary["bytes_formula"]
        assert summary["messages_sent"] == summary["messages_formula"]
        assert num_recorded == 4


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
                run._resume(model, optimizer)
            except WorkbookError as error:
                said.append(str(error))
        return said

    first, other = run_ranks(work, 2)
    assert first == other and len(first) > 20
    assert all("checkpoint" in sentence and "\n" not in sentence for sentence in first)


def interrupted(cluster: Cluster, name: str, where: str, at: int, rank: int, **changes: Any) -> str:
    """Train, with a Ctrl-C for one rank when it calls this method of Run for the `at`-th time.

    Returns what Stopped says; "" if the run came to its end.
    """
    original, calls = getattr(Run, where), 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and cluster.rank == rank:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    with mock.patch.object(Run, where, method):
        try:
            train(cluster, name, **changes)
        except Stopped as stopped:
            return str(stopped)
    return ""


@pytest.mark.parametrize(
    ("name", "world_size", "where", "at", "last_step"),
    [
        ("naive", 2, "batch", 3, 3),
        ("overlap", 2, "step", 2, 2),
        ("bucket", 3, "batch", 1, 1),
        ("bucket", 3, "sent", 3, 4),  # too late to tell the others in this step
        ("ddp", 2, "batch", 2, 2),
    ],
)
def test_after_ctrl_c_on_one_rank_all_stop_after_the_same_step_and_can_go_on(
    tmp_path, name, world_size, where, at, last_step
):
    def work(cluster: Cluster) -> tuple[str, str]:
        said = interrupted(cluster, name, where, at, world_size - 1, checkpoint=str(tmp_path))
        if cluster.is_main:
            assert os.listdir(tmp_path) == [checkpoint.NAME]
        return said, train(cluster, name, checkpoint=str(tmp_path), resume=True)["replica_digest"]

    [(said, resumed)] = set(run_ranks(work, world_size))
    assert said.startswith(f"stopped after step {last_step} of {STEPS};")
    assert str(tmp_path) in said and "\n" not in said
    assert resumed == everyones_summaries(world_size)[name][0]["replica_digest"]


@pytest.mark.parametrize("where", ["batch", "sent", "finish"])
def test_ctrl_c_in_the_last_step_lets_the_run_end_with_its_report(tmp_path, where):
    def work(cluster: Cluster) -> str:
        before = signal.getsignal(signal.SIGINT)
        at = 1 if where == "finish" else 2
        said = interrupted(cluster, "naive", where, at, 1, steps=2, checkpoint=str(tmp_path))
        assert signal.getsignal(signal.SIGINT) == before
        return said

    assert run_ranks(work, 2) == ["", ""]
    assert checkpoint.unpack(checkpoint.read(tmp_path), "")["step"] == 2


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_at_the_launcher_saves_and_leaves_no_process(tmp_path):
    folder, errors = tmp_path / "run", tmp_path / "errors"
    command = [sys.executable, "-m", "lab.torchrun"]
    command += ["--nproc-per-node=2", "data_parallel/train_naive.py", "--size", "tiny", "--steps", "100000"]
    command += ["--checkpoint", str(folder)]

    def pids() -> list[int]:
        return [int(pid) for pid in re.findall(r"here as process (\d+)", errors.read_text())]

    with (
        errors.open("w") as err,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True) as torchrun,
    ):
        try:
            assert torchrun.stdout is not None
            assert any("step 1/100000" in line for line in torchrun.stdout)
            assert len(pids()) == 2
            torchrun.send_signal(signal.SIGINT)
            torchrun.communicate(timeout=30)
            assert not any(alive(pid) for pid in pids())
        finally:
            torchrun.kill()
            for pid in filter(alive, pids()):
                os.kill(pid, signal.SIGKILL)
    assert torchrun.returncode > 0
    said = errors.read_text()
    assert "Traceback" not in said
    [step] = set(re.findall(r"^rank [01]: stopped after step (\d+) of 100000;", said, re.MULTILINE))
    assert os.listdir(folder) == [checkpoint.NAME]
    assert checkpoint.unpack(checkpoint.read(folder), "")["step"] == int(step)


def test_what_spans_cannot_tell_is_left_out_of_the_report_with_the_reason():
    def training(cluster: Cluster) -> dict[str, Any]:
        run = Run(cluster, Args(steps=2, size="tiny", batch_size=2), "test")
        run.unseen = "no rank looked"
        model = run.model()
        for _ in run.steps(model, run.optimizer(model)):
            with run.step() as this, timeline.span("forward", "forward"):
                this.loss = 1.0
        return run.finish(model)

    (summary,) = run_ranks(training, 1)
    assert [summary[name] for name in ("compute_seconds", "communication_seconds", "hidden_share")] == [
        None
    ] * 3
    assert summary["not_measured"] == "compute, communication, hidden share: no rank looked"
    assert summary["step_seconds"] > 0
