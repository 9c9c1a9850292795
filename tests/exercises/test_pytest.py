"""Graders and courses run exercises with plain pytest, by name or by marker, and get a report with credit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.commands import main
from exercises.conftest import asks_for_bugs, is_asked_for, markers_of, unknown_marker
from exercises.find_the_bug import bugs
from exercises.generate import generated
from exercises.workspace import Workspace
from tests.exercises.in_process import solved

GPIPE, ONE_F_ONE_B = BY_NAME["pipeline_gpipe"], BY_NAME["pipeline_1f1b"]
NAMES = {exercise.name for exercise in EXERCISES}
TESTPATHS = ["tests", "exercises"]


@pytest.fixture
def handed_in(tmp_path) -> Path:
    """A folder with one exercise that is not written, and one whose rows do their backwards in reverse."""
    reversed_backwards = solved(GPIPE).replace(
        "return table", "return [row[: len(row) // 2] + row[: len(row) // 2 - 1 : -1] for row in table]"
    )
    for exercise, text in ((GPIPE, reversed_backwards), (ONE_F_ONE_B, generated(ONE_F_ONE_B))):
        (tmp_path / exercise.file).parent.mkdir(exist_ok=True)
        (tmp_path / exercise.file).write_text(text)
    return tmp_path


def test_what_was_handed_in_is_graded_by_marker_with_an_exit_code_a_report_and_partial_credit(handed_in):
    report = handed_in / "report.json"
    options = ["--submission", str(handed_in), "--exercise-report", str(report), "-p", "no:cacheprovider"]
    chosen = ["exercises/pipeline_parallel", "-m", "pipeline_gpipe or pipeline_1f1b"]
    command = [sys.executable, "-m", "pytest", *chosen, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout and "exercises/conftest.py:" not in done.stdout
    found = json.loads(report.read_text())
    states = [(row["name"], row["state"], row["credit"]) for row in found["exercises"]]
    assert states == [("pipeline_gpipe", "failed", 0.5), ("pipeline_1f1b", "unsolved", 0.0)]
    assert found["credit"] == 0.25
    assert "0.50  pipeline_gpipe: 1 of 2 tests" in done.stdout
    assert "gpipe(2, 2), rank 0, slot 2: 0B0 is expected, but the row has 0B1 there." in done.stdout


def test_the_command_line_grades_what_was_handed_in_and_leaves_the_graders_progress_alone(tmp_path, capsys):
    file = tmp_path / "handed_in" / GPIPE.file
    file.parent.mkdir(parents=True)
    file.write_text(generated(GPIPE))
    space = Workspace(tmp_path / "own")
    assert main(["check", GPIPE.name, "--submission", str(tmp_path / "handed_in")], space) == 1
    assert "pipeline_gpipe: unsolved" in capsys.readouterr().out
    assert main(["check", ONE_F_ONE_B.name, "--submission", str(tmp_path / "handed_in")], space) == 1
    assert "There is no file" in capsys.readouterr().out
    assert space.progress[GPIPE.name].state == "not checked" and not space.folder.exists()


def test_a_folder_that_does_not_exist_grades_nothing(tmp_path, capsys):
    gone = tmp_path / "gone"
    assert main(["check", "--all", "--submission", str(gone)], Workspace(tmp_path)) == 2
    printed = capsys.readouterr()
    assert printed.err == f"There is no folder {gone}.\n" and printed.out == ""


@pytest.mark.parametrize(
    "arguments, expressions, expected",
    [
        (TESTPATHS, ["", ""], False),
        (TESTPATHS, ["", "ring"], False),
        (TESTPATHS, ["pipeline_1f1b", ""], True),
        (TESTPATHS, ["", "ring_all_gather and not slow"], True),
        (["exercises"], ["", ""], True),
        (["exercises/comm/ring_all_gather.py"], ["", ""], True),
        (["tests/comm"], ["", ""], False),
        ([str(ROOT / "tests"), str(ROOT / "exercises")], ["", ""], False),  # a worker of pytest-xdist
    ],
)
def test_a_run_of_the_workbooks_tests_leaves_the_exercises_out(monkeypatch, arguments, expressions, expected):
    monkeypatch.chdir(ROOT)
    assert is_asked_for(arguments, TESTPATHS, expressions, NAMES) == expected


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]


def test_a_name_selects_that_exercise_alone_though_other_exercises_have_tests_of_that_name():
    assert set(collected("exercises", "-k", "ring_all_reduce")) == {"exercises/comm/ring_all_reduce.py"}
    files = collected("exercises", "-m", "comm")
    assert len(set(files)) > 5 and all(file.startswith("exercises/comm/") for file in files)


def test_an_exercise_has_its_name_and_its_lesson_as_markers_and_a_bug_says_so():
    assert markers_of(ONE_F_ONE_B) == ["pipeline_1f1b", "pipeline_parallel"]
    assert markers_of(bugs()[0])[-1] == "bug"


def test_a_misspelt_marker_is_answered_with_the_nearest_one():
    command = [sys.executable, "-m", "pytest", "exercises", "-m", "pipeline_1fb", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = "There is no exercise or lesson pipeline_1fb: did you mean pipeline_1f1b?"
    assert said in done.stdout + done.stderr
    assert unknown_marker("comm and not (zero1 or bug)", NAMES | {"comm", "bug"}) is None


def test_bugs_are_graded_only_if_they_are_asked_for():
    one = bugs()[0].name
    for arguments, expression in (
        (["exercises"], "bug"),
        (["exercises"], f"comm or {one}"),
        (["exercises/bugs"], ""),
        ([f"exercises/bugs/{one}.py"], ""),
    ):
        assert asks_for_bugs(arguments, [expression, ""], {one})
    assert not asks_for_bugs(["exercises"], ["comm", ""], {one})
    assert not asks_for_bugs(["exercises"], ["", ""], {one})


def test_a_lessons_marker_leaves_out_the_bugs_that_have_been_opened():
    bug = next(bug for bug in bugs() if bug.target.startswith("pipeline_parallel."))
    file = ROOT / "exercises" / bug.file
    existed = file.exists()
    file.parent.mkdir(exist_ok=True)
    if not existed:
        file.write_text(bug.own_file())
    try:
        assert all("/bugs/" not in name for name in collected("exercises", "-m", "pipeline_parallel"))
    finally:
        if not existed:
            file.unlink()
