"""Whatever a learner's file does, its grade is one sentence."""

import re

import pytest

import exercises.checker.grade
from exercises.catalog import BY_NAME, Exercise
from exercises.checker import run_tests as run_tests_file
from exercises.checker.explain import explain, load_error
from exercises.checker.failure import failure_of
from exercises.checker.grade import Grade, grade
from exercises.checker.run_tests import load
from lab.replace import apply
from tests.exercises.in_process import run_tests, solved

RING = BY_NAME["ring_reduce_scatter"]


def graded(folder, exercise: Exercise, text: str) -> Grade:
    file = folder / f"{exercise.name}.py"
    file.write_text(text)
    result = grade(exercise, file)
    assert "\n" not in result.sentence and "Traceback" not in result.sentence
    assert result.exit_code == (0 if result.state == "passed" else 1)
    return result


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("def reduce_chunks", "def (", "is not Python: invalid syntax."),
        ("def reduce_chunks", "def renamed", "has no function `reduce_chunks`."),
        ("op: str) -> None:", "o: str) -> None:", "must be `reduce_chunks(wire, chunks, op)`, but"),
        ("def reduce", "import comm.algorithms.ring as ring\ndef reduce", "imports comm.algorithms.ring. "),
        ("def reduce", "from exercises import checker\ndef reduce", "imports exercises.checker. "),
    ],
)
def test_a_file_that_cannot_run_is_refused_before_any_test(tmp_path, old, new, sentence):
    result = graded(tmp_path, RING, solved(RING).replace(old, new, 1))
    assert (result.state, result.failed) == ("invalid", RING.tests) and sentence in result.sentence


def test_a_missing_file_counts_as_not_written_and_the_sentence_says_how_to_get_it(tmp_path):
    result = grade(RING, tmp_path / "gone.py")
    assert (result.state, result.credit) == ("unsolved", 0.0)
    assert "watch ring_reduce_scatter" in result.sentence


def test_a_file_that_cannot_be_imported_names_the_line(tmp_path):
    file = tmp_path / f"{RING.name}.py"
    file.write_text("import no_such_module\n" + solved(RING))
    with pytest.raises(ModuleNotFoundError) as found:
        load(RING, file)
    sentence = load_error(file, failure_of(found.value))
    assert "line 1 of ring_reduce_scatter.py: ModuleNotFoundError" in sentence
    assert "\n" not in sentence


def explained(folder, capsys, old: str, new: str) -> tuple[Grade, int]:
    """Return the grade for a change of the ring, and the number of the changed line."""
    file = folder / f"{RING.name}.py"
    text = solved(RING).replace(old, new)
    file.write_text(text)
    with apply(load(RING, file)):
        test, error = run_tests(RING)
    failure = failure_of(error, test) | {"printed": capsys.readouterr().out}
    tests = [{"id": test, "passed": False, "failure": failure}]
    result = exercises.checker.grade._graded(RING, file, tests, "invalid", "")
    assert "\n" not in result.sentence
    return result, text.partition(new)[0].count("\n") + 1


def test_a_failure_names_the_rank_the_line_and_the_error_and_shows_what_was_printed(tmp_path, capsys):
    wrong = "print('step', step); 1 / (r - 2); arrived = torch"
    result, line = explained(tmp_path, capsys, "arrived = torch", wrong)
    assert result.state == "failed"
    assert result.sentence.startswith(
        'With your `reduce_chunks`, "ring all reduce equals one process" does not hold: rank 2 at line '
    )
    assert f"line {line} of ring_reduce_scatter.py: ZeroDivisionError: division by zero" in result.sentence
    assert "[rank 2] step 0" in result.printed


def test_the_first_test_that_fails_is_explained_with_the_factor_and_its_likely_cause(tmp_path):
    exercise = BY_NAME["naive_gradient_sync"]
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(solved(exercise).replace('"mean", self.group', '"sum", self.group'))
    with apply(load(exercise, file)):
        test, error = run_tests(exercise)
    sentence = explain(exercise, file, {"id": test, "failure": failure_of(error, test)}).sentence
    assert re.search(r"rank \d: `assert_close\(ours.grad, expected.grad, .*\)`: 3 times what it", sentence)
    assert "There are 3 ranks: it is a sum over ranks that should be a mean" in sentence


def test_a_loop_without_an_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises.checker.grade, "LIMIT_SECONDS", 1.0)
    result = graded(tmp_path, RING, "while True: pass\n" + solved(RING))
    assert (result.state, result.failed) == ("hangs", RING.tests)
    assert result.sentence == "The tests did not end within 1 s: look for a loop without an end."


def test_a_hang_names_the_line_on_which_each_rank_is_stuck(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_tests_file, "LOOK_SECONDS", 0.3)
    waits = "wire.irecv(arrived, (r - 1) % n).wait()"
    result, line = explained(tmp_path, capsys, "shift(wire, outgoing, arrived)", waits)
    assert result.state == "hangs"
    for rank in range(4):
        assert f"rank {rank} at line {line} of ring_reduce_scatter.py" in result.sentence
    assert result.sentence.endswith("receives first and none has sent. Does a send come too late?")


def test_a_loop_without_an_end_on_the_ranks_is_no_deadlock(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_tests_file, "HANG_SECONDS", 2.0)
    result, line = explained(tmp_path, capsys, "shift(wire, outgoing, arrived)", "while True: pass")
    assert result.state == "hangs" and "wait" not in result.sentence
    # On a busy machine some ranks have not come to the loop when the time is up.
    assert f"still computing at line {line} of ring_reduce_scatter.py" in result.sentence
    assert result.sentence.endswith("look for a loop without an end.")


def test_a_test_process_that_dies_is_reported_with_its_exit_code(tmp_path):
    result = graded(tmp_path, RING, "import os\nos._exit(3)\n" + solved(RING))
    assert (result.state, result.credit) == ("invalid", 0.0)
    assert result.sentence == "The tests' process ended early, with exit code 3."
