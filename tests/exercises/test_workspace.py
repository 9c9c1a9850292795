"""The learner's progress survives, hints open one by one, and a reset loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

import exercises.commands
from exercises.catalog import EXERCISES, ROOT
from exercises.checker.grade import Grade
from exercises.commands import main
from exercises.find_the_bug import bugs
from exercises.generate import generated
from exercises.workspace import Workspace

FIRST = EXERCISES[0]
TEXT = "Written by hand.\n"


@pytest.fixture
def space(tmp_path):
    space = Workspace(tmp_path)
    for exercise in EXERCISES:
        space.reset(exercise)
    return space


def passed(name: str) -> Grade:
    return Grade(name, "passed", "It is right.", ("one",))


def test_hints_open_one_by_one(space, capsys):
    for number in (1, 2, 3, 3):
        assert main(["hint", FIRST.name], space) == 0
        assert capsys.readouterr().out.count("Hint ") == number
    assert Workspace(space.folder).progress[FIRST.name].hints == 3


def test_hints_that_are_opened_after_passing_are_shown_and_not_counted(space, capsys):
    main(["hint", FIRST.name], space)
    space.record(passed(FIRST.name))
    main(["hint", FIRST.name], space)
    again = Workspace(space.folder)
    assert main(["hint", FIRST.name], again) == 0
    assert "Hint 3 of 3" in capsys.readouterr().out
    assert again.progress[FIRST.name].hints == 1


def test_a_failed_check_after_passing_does_not_take_the_pass_back(space, capsys):
    minutes = space.minutes_left()
    space.record(passed(FIRST.name))
    space.record(Grade(FIRST.name, "failed", "It is wrong."))
    again = Workspace(space.folder)
    assert main(["list"], again) == 0
    assert "passed earlier" in (out := capsys.readouterr().out)
    assert f"1 of {len(EXERCISES)} have passed" in out
    assert (again.next_exercise(), again.minutes_left()) == (EXERCISES[1], minutes - FIRST.minutes)


def test_the_list_counts_mended_bugs_by_themselves(space, capsys):
    space.record(passed(bugs()[0].name))
    assert main(["list"], space) == 0
    out = capsys.readouterr().out
    assert f"0 of {len(EXERCISES)} have passed" in out
    assert f"1 of {len(bugs())} bugs are mended" in out


def test_the_lists_fit_into_80_columns_and_shorten_nothing(space, capsys, monkeypatch):
    monkeypatch.setattr(exercises.commands, "console", Console(width=80, soft_wrap=True))
    space.record(passed(FIRST.name))
    space.record(Grade(FIRST.name, "failed", "It is wrong."))
    for command, headings in (
        ("list", ["exercise", "difficulty", "minutes", "state", "hints", "notebook"]),
        ("bugs", ["bug", "state", "symptom"]),
    ):
        main([command], space)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == headings
        assert max(map(len, lines[:-2])) <= 80 and "…" not in "".join(lines)


def test_of_a_mended_bug_it_is_said_that_it_is_mended(space, capsys):
    main(["bug", bugs()[0].name], space)
    assert bugs()[0].in_what_way in capsys.readouterr().out
    space.record(passed(bugs()[0].name))
    assert main(["bug", bugs()[0].name], space) == 0
    assert "You have mended this bug" in (out := capsys.readouterr().out) and "is wrong" not in out


def test_a_reset_loses_nothing(space, capsys):
    for copy in (1, 2):
        space.file(FIRST).write_text(TEXT * copy)
        assert main(["reset", FIRST.name], space) == 0
        assert f"{FIRST.name}.{copy}.py" in capsys.readouterr().out
    assert space.file(FIRST).read_text() == generated(FIRST)
    saved = sorted((space.folder / ".saved").iterdir())
    assert [path.read_text() for path in saved] == [TEXT, TEXT * 2]


def test_a_reset_of_an_unchanged_file_saves_no_copy(space):
    assert space.reset(FIRST) is None
    assert not (space.folder / ".saved").exists()


def test_progress_survives_and_the_next_exercise_follows(space, capsys):
    before = space.minutes_left()
    space.record(passed(FIRST.name))
    again = Workspace(space.folder)
    assert again.progress[FIRST.name].state == "passed"
    assert again.minutes_left() == before - FIRST.minutes
    assert again.next_exercise() == (EXERCISES[1] if len(EXERCISES) > 1 else None)
    assert main(["list", "--json"], again) == 0
    assert json.loads(capsys.readouterr().out)["minutes_left"] == again.minutes_left()


def test_after_the_last_exercise_a_sentence_says_so(space, capsys):
    for exercise in EXERCISES:
        space.record(passed(exercise.name))
    assert main([], space) == 0
    assert capsys.readouterr().out == "All exercises have passed.\n"


@pytest.mark.parametrize("damage", ["{", "[]", '{"%s": {"hints": "many"}}', '{"%s": {"unknown": 1}}', "\0"])
def test_damaged_progress_is_set_aside_with_one_sentence(space, capsys, damage):
    space.progress_file.write_text(damage.replace("%s", FIRST.name))
    again = Workspace(space.folder)
    assert again.progress[FIRST.name].state == "not checked"
    assert "was damaged" in (text := capsys.readouterr().err) and text.count("\n") == 1
    assert (space.folder / ".progress.damaged.json").exists()


def test_the_solution_is_shown_after_passing_or_when_asked_twice(space, capsys):
    assert main(["solution", FIRST.name], space) == 1
    assert "def " not in capsys.readouterr().out
    assert main(["solution", FIRST.name], space) == 0
    assert f"def {FIRST.function}" in capsys.readouterr().out
    space.reset(FIRST)
    assert space.solution(FIRST) is None
    space.record(passed(FIRST.name))
    assert space.solution(FIRST) is not None


def test_an_unknown_name_is_answered_with_a_sentence(space, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["check", "no_such_exercise"], space)
    assert exit.value.code == 2
    assert "There is no exercise 'no_such_exercise'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, said",
    [
        ("zero1", "zero1 is an exercise and no command: did you mean `python -m exercises check zero1`?\n"),
        ("chekc", "There is no command 'chekc': did you mean `python -m exercises check`?\n"),
        ("qqqqqq", "There is no command 'qqqqqq'. The commands are list, check,"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_a_sentence(space, capsys, word, said):
    assert main([word], space) == 2
    assert capsys.readouterr().err.startswith(said)


def test_started_by_make_it_prints_commands_of_make(space, capsys, monkeypatch):
    main([], space)
    assert f"python -m exercises watch {FIRST.name}\n" in capsys.readouterr().out
    monkeypatch.setenv("EXERCISES_BY_MAKE", "1")
    for command in ([], ["list"], ["bugs"], ["bug"]):
        assert main(command, space) == 0
        out = capsys.readouterr().out
        assert "make exercises ARGS='" in out and "python -m exercises" not in out


def test_without_the_workbooks_libraries_it_says_what_to_type():
    code = "import sys; sys.modules['rich'] = None; sys.argv = ['exercises', 'watch', 'zero1']\n"
    code += "import runpy; runpy.run_module('exercises', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert 'make exercises ARGS="watch zero1"' in done.stderr and "activate" in done.stderr


def test_bugs_are_listed_by_lesson_and_the_easiest_first(space, capsys):
    main(["bugs"], space)
    out = capsys.readouterr().out
    headings = [line.split("  ")[0] for line in out.splitlines() if ", difficulty " in line]
    lessons = list(dict.fromkeys(heading.partition(",")[0] for heading in headings))
    assert lessons[:2] == ["comm", "data_parallel"]
    assert headings == sorted(set(headings), key=lambda h: (lessons.index(h.partition(",")[0]), h))


def test_checking_all_prints_a_report_with_credit(space, capsys):
    assert main(["check", "--all", "--json"], space) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["credit"] == 0.0
    assert [row["name"] for row in report["exercises"]] == [exercise.name for exercise in EXERCISES]
    assert {row["state"] for row in report["exercises"]} == {"unsolved"}


def test_watching_grades_each_save_and_ctrl_c_ends_it(space):
    # A shell starts background jobs with Ctrl-C ignored, and their processes inherit that.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "import sys; from exercises.commands import main; from exercises.workspace import Workspace\n"
    code += f"from pathlib import Path; sys.exit(main(['watch'], Workspace(Path({str(space.folder)!r}))))"
    watching = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert f"Watching {space.file(FIRST)}" in watching.stdout.readline()
        assert watching.stdout.readline() == "Grading ...\n"
        assert "is not written yet" in watching.stdout.readline()
        assert "Ctrl-C ends" in watching.stdout.readline()
        space.file(FIRST).write_text("def (\n")
        assert watching.stdout.readline() == "Grading ...\n"
        assert "is not Python" in watching.stdout.readline()
        time.sleep(0.1)
        os.kill(watching.pid, signal.SIGINT)
        out, err = watching.communicate(timeout=20)
        assert watching.returncode == 0
        assert out.endswith("\nStopped watching.\n") and "Traceback" not in out + err
    finally:
        watching.kill()
