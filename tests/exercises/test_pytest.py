"""Graders and courses run exercises with plain pytest, by name or by marker, and get a report with credit."""

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.commands import main
from exercises.conftest import asks_for_bugs, is_asked_for, markers_of, unknown_marker
from exercises.find_the_bug import bugs
from exercises.generate import generated
from exercises.workspace import Workspace

GPIPE, ONE_F_ONE_B = BY_NAME["pipeline_gpipe"], BY_NAME["pipeline_1f1b"]
NAMES = {exercise.name for exercise in EXERCISES}
TESTPATHS = ["tests", "exercises"]


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


def test_an_exercise_has_its_name_and_its_lesson_as_markers_and_a_bug_says_so():
    assert markers_of(ONE_F_ONE_B) == ["pipeline_1f1b", "pipeline_parallel"]
    assert markers_of(bugs()[0])[-1] == "bug"


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


def test_a_marker_that_is_no_exercise_and_no_lesson_is_answered_with_the_nearest_one():
    known = NAMES | {"comm", "bug"}
    said = unknown_marker("pipeline_1fb", known)
    assert said == "There is no exercise or lesson pipeline_1fb: did you mean pipeline_1f1b?"
    assert unknown_marker("comm and not (zero1 or bug)", known) is None
