"""An open exercise passes with any right solution, and not with one that sends or holds too much."""

import pytest

from comm.algorithms import star
from exercises.catalog import BY_NAME, EXERCISES
from lab.replace import apply
from pipeline_parallel.schedules import gpipe
from tests.exercises.in_process import run_tests
from tests.exercises.other_ways import SOLUTIONS, NaiveDataParallel

OPEN = [exercise for exercise in EXERCISES if exercise.stub]


class OneByOne(NaiveDataParallel):
    """Has the signature of buckets, and sends each gradient alone, after the backward."""

    def __init__(self, module, group=None, bucket_mb=1.0):
        super().__init__(module, group)


@pytest.mark.parametrize("exercise", OPEN, ids=lambda exercise: exercise.name)
def test_another_way_passes(exercise):
    with apply(dict(zip(exercise.targets, SOLUTIONS[exercise.name], strict=True))):
        test, error = run_tests(exercise)
    assert error is None, f"{test}: {error}"


@pytest.mark.parametrize(
    "name, wrong, number, words",
    [
        ("open_all_reduce", star.all_reduce, 2, "bytes on 3 ranks, and not 2(n-1)/n"),
        (
            "open_buckets",
            OneByOne,
            1,
            "a step sent 16 messages for 8 KiB in buckets of 2 KiB on 2 ranks, and not",
        ),
        ("open_buckets", OneByOne, 3, "all messages left after the backward"),
        ("open_1f1b", gpipe, 1, "with 2 stages and 4 microbatches rank 0 holds 4 microbatches, and not 2"),
    ],
)
def test_what_is_right_and_wasteful_fails_and_the_error_says_how_much(name, wrong, number, words):
    exercise = BY_NAME[name]
    with apply({exercise.target: wrong}):
        _, error = run_tests(exercise, exercise.tests[number])
    assert words in str(error)
