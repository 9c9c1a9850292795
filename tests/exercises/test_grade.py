"""Whatever a learner's file does, its grade is one sentence."""

import re
import time
from pathlib import Path

import cloudpickle
import pytest
from IPython.core.interactiveshell import InteractiveShell

import exercises.checker.grade
import exercises.notebook
from exercises.catalog import BY_NAME, EXERCISES, Exercise
from exercises.checker import run_tests as run_tests_file
from exercises.checker.explain import explain, load_error
from exercises.checker.failure import failure_of
from exercises.checker.grade import Grade, grade
from exercises.checker.inspect_file import problem_of
from exercises.checker.run_tests import load
from exercises.checker.targets import TARGETS
from exercises.notebook import check
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


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("    ", "\t").encode(),
        lambda text: f"# coding: latin-1\n# caf\u00e9\n{text}".encode("latin-1"),
    ],
    ids=["byte order mark", "CR LF", "tabs", "declared encoding"],
)
def test_a_file_is_read_as_python_reads_it_however_it_is_saved(tmp_path, change):
    file = tmp_path / f"{RING.name}.py"
    file.write_bytes(change(solved(RING)))
    assert problem_of(RING, file) is None
    assert set(load(RING, file)) == set(RING.targets)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_file_in_an_encoding_that_python_does_not_read_is_told_to_be_saved_as_utf_8(tmp_path, encoding):
    file = tmp_path / f"{RING.name}.py"
    file.write_bytes(f"# caf\u00e9\n{solved(RING)}".encode(encoding))
    state, sentence = problem_of(RING, file)
    assert state == "invalid" and "is not saved as UTF-8: choose this encoding in your editor." in sentence


GPIPE = BY_NAME["pipeline_gpipe"]


def with_first_line(line: str) -> str:
    """Return the right solution of GPipe with a line before its first statement."""
    return solved(GPIPE).replace("    return ", f"    {line}\n    return ", 1)


@pytest.mark.parametrize(
    "line",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=[60]).start()",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "import os; os.fork()",
        "import os; os.chdir('/')",
        "import os; os.read(0, 1); print('x' * 1_000_000)",
    ],
    ids=["thread", "program", "fork", "folder", "input and output"],
)
def test_a_right_solution_passes_promptly_whatever_it_leaves_behind(tmp_path, line):
    begin = time.monotonic()
    assert graded(tmp_path, GPIPE, with_first_line(line)).state == "passed"
    assert time.monotonic() - begin < 50


def test_a_solution_that_exits_fails_at_its_line(tmp_path):
    result = graded(tmp_path, GPIPE, with_first_line("raise SystemExit(0)"))
    assert result.state == "failed" and "pipeline_gpipe.py: SystemExit: 0" in result.sentence


def defined_in_a_cell(name: str) -> dict:
    cell = {"__name__": "no_module_of_that_name"}
    exec(solved(BY_NAME[name]), cell)
    return cell


def judged_here(exercise: Exercise, file: Path) -> Grade:
    with apply(load(exercise, file)):
        test, error = run_tests(exercise)
    return Grade(exercise.name, "failed" if error else "passed", f"{test}: {error}", exercise.tests)


def test_a_function_from_a_cell_is_graded_under_its_own_name(capsys, monkeypatch):
    monkeypatch.setattr(exercises.notebook, "judge", judged_here)
    result = check(defined_in_a_cell("pipeline_gpipe")["gpipe"])
    assert (result.name, result.state, result.credit) == ("pipeline_gpipe", "passed", 1.0)
    assert capsys.readouterr().out.startswith("pipeline_gpipe: passed. ")


def test_an_error_and_a_hang_in_a_cell_name_the_line_of_the_cell(tmp_path):
    name = "/tmp/ipykernel_7/123456.py"
    file = tmp_path / "pipeline_gpipe.pickle"
    file.write_bytes(cloudpickle.dumps({"pipeline_parallel.schedules.gpipe": len}))
    trace = f'File "{name}", line 2, in gpipe\nFile "/library.py", line 9, in f\nKeyError: 1'
    stuck = "no answer within 1 s.\n  rank 0 is stuck at /comm/wire.py:61 in wait: work.wait()\n"
    stuck += f"      called from {name}:2 in gpipe: "
    cases = (
        (trace, f"rank 0 failed:\n\n{trace}", "line 2 of your cell: KeyError: 1"),
        (stuck, stuck, "at line 2 of"),
    )
    for where, text, said in cases:
        failure = dict.fromkeys(("difference", "cause", "drawing", "is_error"), "")
        failure |= {"rank": 0, "text": text, "trace": where, "difference": "KeyError: 1"}
        sentence = explain(BY_NAME["pipeline_gpipe"], file, {"id": "test_it", "failure": failure}).sentence
        assert said in sentence and "outside" not in sentence


def test_another_signature_is_refused_in_a_sentence():
    result = check(lambda stages: [], "pipeline_gpipe")
    assert result.sentence == "The parameters must be (stages, microbatches), but they are (stages)."
    assert result.state == "invalid"


def test_a_wrong_name_is_answered_in_a_sentence_without_a_traceback(capsys):
    with pytest.raises(LookupError, match=r"Several exercises have a function 'forward': .*row_parallel"):
        check(defined_in_a_cell("row_parallel")["forward"])
    shell = InteractiveShell()
    for call in ('check(gpipe, "pipeline_gpip")', 'bug("bug_naive")'):
        shell.push({"check": check, "bug": exercises.notebook.bug} | defined_in_a_cell("pipeline_gpipe"))
        shell.run_cell(call)
        printed = "".join(capsys.readouterr())
        assert printed.count("\n") == 1 and printed.startswith("There is no exercise")


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
