"""Arguments that make no sense, or differ among ranks, are refused before the first step."""

import functools
import math
from typing import Any
from unittest import mock

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.refusals import the_one_sentence
from tests.training.attempts import refusal
from training.run import Run

# Script, arguments, and what the sentence must name.
NONSENSE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("naive", {"steps": 0}, ["--steps 0"]),
    ("naive", {"batch_size": 0}, ["--batch-size 0"]),
    ("naive", {"batch_size": 13}, ["2 ranks cannot share a batch of 13 ", "such as --batch-size 14."]),
    ("naive", {"batch_size": 10**30}, ["--batch-size 1000", "at most 1048576 examples"]),
    ("accumulation", {"grad_acc_steps": 5}, ["--grad-acc-steps", "6 examples"]),
    ("overlap", {"grad_acc_steps": 0}, ["--grad-acc-steps"]),
    ("naive", {"link": "fast"}, ["--link fast", "1gbit"]),
    ("naive", {"link": "1gbit,5"}, ["--link 1gbit,5", "2ms"]),
    ("naive", {"metronome": "5"}, ["--metronome 5", "2ms"]),
    ("naive", {"metronome": ""}, ["--metronome", "2ms"]),
    ("cnn", {"metronome": "5ms"}, ["--metronome"]),
    ("naive", {"resume": True}, ["--resume", "--checkpoint"]),
    ("naive", {"auto_resume": True}, ["--auto-resume", "--checkpoint"]),
    ("naive", {"resume": True, "auto_resume": True, "checkpoint": "a"}, ["give one of them"]),
    ("bucket", {"bucket_mb": 0.0}, ["--bucket-mb 0"]),
    ("bucket", {"bucket_mb": math.inf}, ["--bucket-mb inf"]),
    ("ddp", {"bucket_mb": math.nan}, ["--bucket-mb nan"]),
    ("naive", {"eval_every": -1}, ["--eval-every -1"]),
    ("zero3", {"clip": 0.0}, ["--clip 0"]),
    ("naive", {"lr": 0.0}, ["--lr 0"]),
    ("naive", {"lr": math.nan}, ["--lr nan"]),
    ("naive", {"seed": -1}, ["--seed -1"]),
    ("naive", {"seed": 1 << 70}, ["--seed", "to 4294967295"]),
    ("naive", {"checkpoint": ""}, ["--checkpoint", "folder"]),
    ("naive", {"trace": "/dev/null/traces"}, ["--trace /dev/null/traces", "another folder"]),
]


@functools.cache
def refusals() -> list[tuple[str, ...]]:
    """Return what each of two ranks says to every case, one case after the other in the same group."""

    def work(cluster: Cluster) -> list[str]:
        with mock.patch.object(Run, "batch", side_effect=AssertionError("trained")):
            return [refusal(cluster, name, **changes) for name, changes, _ in NONSENSE]

    return list(zip(*run_ranks(work, 2, timeout=30), strict=True))


@pytest.mark.parametrize("case", range(len(NONSENSE)))
def test_arguments_that_make_no_sense_are_refused_in_a_sentence(case):
    sentence = the_one_sentence(refusals()[case])
    assert all(word in sentence for word in NONSENSE[case][2])


def test_ranks_with_different_arguments_are_told_who_has_what_before_one_of_them_refuses_its_own():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps": 0}, "--steps is 1 on rank 0, 2 and 0 on rank 1"),  # which rank 1 alone would refuse
        ({"checkpoint": "runs"}, "--checkpoint is unset on rank 0, 2 and runs on rank 1"),
        (
            {"mode": "overlap"},
            "RUN_MODE is data_parallel_naive on rank 0, 2 and data_parallel_overlap on rank 1",
        ),
    ]

    def work(cluster: Cluster) -> list[str]:
        mine = [{"mode": "naive"} | (changes if cluster.rank == 1 else {}) for changes, _ in cases]
        return [refusal(cluster, **arguments) for arguments in mine]

    for (_, words), *texts in zip(cases, *run_ranks(work, 3, timeout=30), strict=True):
        assert the_one_sentence(texts) == f"{words}: start all ranks with the same arguments"
