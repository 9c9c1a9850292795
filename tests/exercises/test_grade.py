"""Whatever a learner's file does, its grade is one sentence."""

import json
import re
import subprocess

import pytest

import exercises.checker.grade
from exercises.catalog import BY_NAME, Exercise
from exercises.checker import plugin
from exercises.checker.explain import explain, load_error, most_telling
from exercises.checker.failure import failure_of
from exercises.checker.grade import Grade, grade
from exercises.checker.plugin import load
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
    "old, new, state, sentence",
    [
        ("def reduce_chunks", "def (", "invalid", "is not Python: invalid syntax."),
        ("def reduce_chunks", "def renamed", "invalid", "has no function `reduce_chunks`."),
        (
            "op: str) -> None:",
            "o: str) -> None:",
            "invalid",
            "must be `reduce_chunks(wire, chunks, op)`, but",
        ),
    ],
)
def test_a_file_that_cannot_run_is_refused_before_any_test(tmp_path, old, new, state, sentence):
    result = graded(tmp_path, RING, solved(RING).replace(old, new, 1))
    assert result.state == state and sentence in result.sentence
    assert result.failed == RING.tests


def test_what_the_code_prints_in_the_failed_test_is_shown_with_its_rank(tmp_path, capsys):
    file, report = tmp_path / f"{RING.name}.py", tmp_path / "report.json"
    file.write_text(solved(RING).replace("shift(wire, outgoing, arrived)", "print('step', step); break"))
    with apply(load(RING, file)):
        test, error = run_tests(RING)
    failure = failure_of(error, test) | {"printed": capsys.readouterr().out}
    tests = [{"id": test, "passed": False, "failure": failure}]
    report.write_text(json.dumps({"load_error": None, "tests": tests}))
    result = exercises.checker.grade._graded(RING, file, report, "invalid", "")
    assert result.state == "failed"
    assert "[rank 0] step 0" in result.printed and "[rank 3] step 0" in result.printed


def test_a_missing_file_says_how_to_get_it_again(tmp_path):
    result = grade(RING, tmp_path / "gone.py")
    assert "reset ring_reduce_scatter" in result.sentence


def test_a_file_that_cannot_be_imported_names_the_line(tmp_path):
    file = tmp_path / f"{RING.name}.py"
    file.write_text("import no_such_module\n" + solved(RING))
    with pytest.raises(ModuleNotFoundError) as found:
        load(RING, file)
    sentence = load_error(RING, file, failure_of(found.value))
    assert "line 1 of ring_reduce_scatter.py: ModuleNotFoundError" in sentence
    assert "\n" not in sentence


def explained(folder, old: str, new: str) -> tuple[str, str, int]:
    """Return the state and the sentence for a change of the ring, and the number of the changed line."""
    file = folder / f"{RING.name}.py"
    text = solved(RING).replace(old, new)
    file.write_text(text)
    with apply(load(RING, file)):
        test, error = run_tests(RING)
    assert error is not None
    state, sentence, _ = explain(RING, file, {"id": test, "failure": failure_of(error, test)})
    assert "\n" not in sentence
    return state, sentence, text.partition(new)[0].count("\n") + 1


def test_a_failure_names_the_rank_the_line_and_the_error(tmp_path):
    state, sentence, line = explained(tmp_path, "arrived = torch", "1 / (r - 2); arrived = torch")
    assert state == "failed"
    assert sentence.startswith('In the test "ring all reduce equals one process": rank 2 at line ')
    assert f"line {line} of ring_reduce_scatter.py: ZeroDivisionError: division by zero" in sentence


def test_a_wrong_result_says_by_how_much(tmp_path):
    state, sentence, _ = explained(tmp_path, "r - 2 - step", "r - step")
    assert state == "failed"
    assert re.search(r"`.+`: off by \S+, where the largest element is \S+ \(element \[\d\]: got ", sentence)


def test_a_constant_factor_is_named_with_its_likely_cause(tmp_path):
    exercise = BY_NAME["naive_gradient_sync"]
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(solved(exercise).replace('op="mean"', 'op="sum"'))
    with apply(load(exercise, file)):
        test, error = run_tests(exercise)
    other = {"id": "tests/other.py::test", "failure": failure_of(AssertionError("No numbers."))}
    telling = {"id": test, "failure": failure_of(error, test)}
    assert most_telling([other, telling]) == telling
    _, sentence, _ = explain(exercise, file, telling)
    assert re.search(r"rank \d: `ours.grad`: 3 times what it should be \(element \[\d, \d\]: got ", sentence)
    assert "There are 3 ranks: it is a sum over ranks that should be a mean" in sentence


def test_an_assertion_of_one_process_is_told_before_a_hang():
    failure = {"type": "RankError", "rank": None, "difference": None, "cause": "A deadlock."}
    hang = {"failure": failure | {"text": "no answer within 3 s."}}
    assertion = {"failure": failure_of(AssertionError("a message was lost")) | {"cause": None}}
    assert most_telling([assertion, hang]) == assertion
    error_of_a_rank = {"failure": assertion["failure"] | {"rank": 1}}
    assert most_telling([error_of_a_rank, hang]) == hang


def test_a_loop_without_an_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises.checker.grade, "LIMIT_SECONDS", 1.0)
    result = graded(tmp_path, RING, solved(RING))
    assert (result.state, result.failed) == ("hangs", RING.tests)
    assert result.sentence == "The tests did not end within 1 s: look for a loop without an end."


def test_an_error_outside_of_the_learners_function_points_to_what_it_returns(tmp_path):
    file = tmp_path / f"{RING.name}.py"
    file.write_text(solved(RING))
    failed = {"id": "tests/test_it.py::test_it", "failure": failure_of(KeyError("Message"))}
    _, sentence, _ = explain(RING, file, failed)
    assert "KeyError: 'Message'" in sentence
    assert sentence.endswith("outside of your function: look at what it returns or leaves out.")


def test_a_rank_that_dies_is_named(tmp_path):
    state, sentence, _ = explained(
        tmp_path, "arrived = torch", "r == 1 and __import__('os')._exit(7); arrived = torch"
    )
    assert state == "failed"
    assert "rank 1 exited with code 7 before it returned." in sentence


def test_a_hang_names_the_line_on_which_each_rank_is_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "HANG_SECONDS", 2.0)
    waits = "wire.irecv(arrived, (r - 1) % n).wait()"
    state, sentence, line = explained(tmp_path, "shift(wire, outgoing, arrived)", waits)
    assert state == "hangs"
    for rank in range(4):
        assert f"rank {rank} at line {line} of ring_reduce_scatter.py" in sentence
    assert sentence.endswith("receives first and none has sent. Does a send come too late?")


def test_a_loop_without_an_end_on_the_ranks_is_no_deadlock(tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "HANG_SECONDS", 2.0)
    state, sentence, line = explained(tmp_path, "shift(wire, outgoing, arrived)", "while True: pass")
    assert state == "hangs" and "wait" not in sentence
    # On a busy machine some ranks have not come to the loop when the time is up.
    assert f"still computing at line {line} of ring_reduce_scatter.py" in sentence
    assert sentence.endswith("look for a loop without an end.")


def test_a_test_process_that_dies_is_reported_with_its_exit_code(tmp_path, monkeypatch):
    died = subprocess.CompletedProcess([], returncode=3, stdout="", stderr="")
    monkeypatch.setattr(exercises.checker.grade, "_run_tests", lambda *arguments: died)
    result = graded(tmp_path, RING, solved(RING))
    assert (result.state, result.credit) == ("invalid", 0.0)
    assert result.sentence == "The tests' process ended early, with exit code 3."
