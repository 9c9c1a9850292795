"""The lessons' own code meets every target beyond correctness, and solutions that waste do not."""

import pytest

from exercises.catalog import BY_NAME, EXERCISES
from exercises.checker.plugin import load
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


def outcome_with(folder, name: str, *changes: tuple[str, str]):
    """Return the outcome of an exercise's target with changes of the lesson's code."""
    exercise, file = BY_NAME[name], folder / f"{name}.py"
    text = solved(exercise)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    with apply(load(exercise, file)):
        return TARGETS[exercise.beyond]()


def test_a_ring_in_which_full_tensors_travel_is_right_but_sends_more(tmp_path):
    full_tensors = """
    from comm.algorithms.reduction import combine
    from comm.algorithms.ring import shift

    travelling = full.clone()
    for _ in range(wire.size - 1):
        arrived = full.new_empty(full.shape)
        shift(wire, travelling, arrived)
        combine(op, full, arrived, out=full)
        travelling = arrived
"""
    change = ("    chunks = shards_of(full, wire.size)\n", full_tensors)
    others = ("    reduce_chunks(wire, chunks, op)\n", ""), ("    gather_chunks(wire, chunks)\n", "")
    outcome = outcome_with(tmp_path, "ring_all_reduce", change, *others)
    assert not outcome.is_met
    assert outcome.sentence.startswith(
        "Right, but wasteful: for a tensor of 4.0 MB on 4 ranks a rank sends at most 12.0 MB in 3 messages; "
        "6.0 MB in 6 messages do. "
    )


def test_one_backward_for_all_microbatches_is_right_but_keeps_all_activations(tmp_path):
    old = "            loss.backward()\n        total += loss.detach()\n    return total\n"
    new = "            pass\n        total = total + loss\n    total.backward()\n    return total.detach()\n"
    outcome = outcome_with(tmp_path, "accumulation", (old, new))
    assert not outcome.is_met
    assert "the activations of 4 of 4 microbatches are in memory at a time. Run each" in outcome.sentence


def test_a_shard_that_is_a_view_of_its_bucket_is_right_but_keeps_the_bucket(tmp_path):
    own = (".clone())\n    bucket.gradients.untyped_storage().resize_(0)", ")")
    outcome = outcome_with(tmp_path, "zero2", own)
    assert not outcome.is_met
    assert "and holds 3.0 times these bytes; 1.0 and 2.5 are possible." in outcome.sentence


def test_a_schedule_with_a_larger_bubble_is_right_but_ranks_wait(tmp_path):
    outcome = outcome_with(tmp_path, "pipeline_1f1b", ("min(microbatches, stages - 1 - stage)", "0"))
    assert not outcome.is_met
    assert "ranks are idle for " in outcome.sentence and "; 27.3% and 4 are possible." in outcome.sentence
