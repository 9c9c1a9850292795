"""Arguments that make no sense, or differ among ranks, are refused before the first step."""

import functools
import math
from typing import Any
from unittest import mock

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import train
from tests.training.attempts import refusal, the_one_sentence
from training.run import Run

# Script, arguments, and what the sentence must name.
NONSENSE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("naive", {"steps": 0}, ["--steps 0"]),
    ("naive", {"steps": -3}, ["--steps -3"]),
    ("naive", {"batch_size": 13}, ["--batch-size 13: 2 ranks", "such as --batch-size 14."]),
    ("naive", {"batch_size": 10**30}, ["--batch-size 1000", "at most 1048576 examples"]),
    ("naive", {"steps": 10**30}, ["--steps 1000", "at most 1000000000"]),
    ("overlap", {"metronome": "9" * 400 + "s"}, ["--metronome 999", "more than a week"]),
    ("accumulation", {"grad_acc_steps": 5}, ["--grad-acc-steps", "6 examples"]),
    ("bucket", {"grad_acc_steps": 12}, ["--grad-acc-steps", "6 examples"]),
    ("naive", {"link": "fast"}, ["--link fast", "1gbit"]),
    ("naive", {"link": "1gbit,5"}, ["--link 1gbit,5", "2ms"]),
    ("naive", {"metronome": "5"}, ["--metronome 5", "2ms"]),
    ("cnn", {"metronome": "5ms"}, ["--metronome"]),
    ("naive", {"resume": True}, ["--resume", "--checkpoint"]),
    ("naive", {"auto_resume": True}, ["--auto-resume", "--checkpoint"]),
    ("naive", {"resume": True, "auto_resume": True, "checkpoint": "a"}, ["give one of them"]),
    ("accumulation", {"grad_acc_steps": 0}, ["--grad-acc-steps"]),
    ("overlap", {"grad_acc_steps": -1}, ["--grad-acc-steps"]),
    ("bucket", {"bucket_mb": 0.0}, ["--bucket-mb"]),
    ("bucket", {"bucket_mb": -1.0}, ["--bucket-mb"]),
    ("ddp", {"bucket_mb": -1.0}, ["--bucket-mb"]),
    ("bucket", {"bucket_mb": math.inf}, ["--bucket-mb inf"]),
    ("ddp", {"bucket_mb": math.nan}, ["--bucket-mb nan"]),
    ("naive", {"eval_every": -1}, ["--eval-every -1"]),
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


def test_a_trace_that_cannot_be_written_is_refused_before_a_step_is_taken(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(cluster: Cluster) -> str:
        with mock.patch.object(Run, "step", side_effect=AssertionError("trained")):
            return refusal(cluster, "naive", trace=str(tmp_path / "file"))

    assert "--trace" in the_one_sentence(run_ranks(work, 3))
