"""The lessons' own code meets every target beyond correctness, and solutions that waste do not."""

import pytest

from exercises.catalog import BY_NAME, EXERCISES
from exercises.checker.run_tests import load
from exercises.checker.targets import TARGETS
from lab.replace import apply
from tests.exercises.in_process import solved


def test_every_target_belongs_to_an_exercise():
    assert sorted(filter(None, (exercise.beyond for exercise in EXERCISES))) == sorted(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_the_lessons_code_meets_the_target_and_says_so_in_a_sentence(name):
    outcome = TARGETS[name]()
    assert outcome.is_met, outcome.sentence
    assert outcome.sentence[0].isupper() and outcome.sentence.endswith(".") and "\n" not in outcome.sentence


@pytest.mark.parametrize(
    "name, right, wasteful, words",
    [
        (
            "accumulation",
            "        loss.backward()\n        total += loss.detach()\n    return total\n",
            "        total = total + loss\n    total.backward()\n    return total\n",
            "the activations of 4 of 4 microbatches are in memory at a time. Run each",
        ),
        ("pipeline_1f1b", "min(microbatches, stages - 1 - stage)", "0", "; 27.3% and 4 are possible."),
        (
            "ring_all_reduce",
            "    gather_chunks(wire, chunks)\n",
            "    gather_chunks(wire, chunks)\n    gather_chunks(wire, chunks)\n",
            "a rank sends at most 9.0 MB in 9 messages; 6.0 MB in 6 messages do.",
        ),
    ],
)
def test_a_right_solution_that_wastes_does_not_meet_it(tmp_path, name, right, wasteful, words):
    exercise, file, text = BY_NAME[name], tmp_path / f"{name}.py", solved(BY_NAME[name])
    assert right in text
    file.write_text(text.replace(right, wasteful))
    with apply(load(exercise, file)):
        outcome = TARGETS[exercise.beyond]()
    assert not outcome.is_met and outcome.sentence.startswith("Right, but wasteful: ")
    assert words in outcome.sentence
