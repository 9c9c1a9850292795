"""The commands: progress survives, hints open one by one, and a reset loses nothing."""

import io
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from exercises import commands
from exercises.catalog import BY_NAME, EXERCISES
from exercises.checker.grade import Grade
from exercises.commands import chosen, main, tell_next
from exercises.find_the_bug import bugs
from exercises.generate import generated
from exercises.workspace import Workspace
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.replace import replaced
from tests.exercises.in_process import solved
from tests.run_modes import python

FIRST, SECOND = EXERCISES[:2]
TEXT = "Written by hand.\n"


@pytest.fixture
def space(tmp_path):
    return Workspace(tmp_path)


def passed(name: str) -> Grade:
    return Grade(name, "passed", "It is right.", ("one",))


def test_hints_open_one_by_one(space, capsys):
    for number in (1, 2, 3, 3):
        assert main(["hint", FIRST.name], space) == 0
        assert capsys.readouterr().out.count("Hint ") == number
    assert Workspace(space.folder).progress[FIRST.name].hints == 3


def test_progress_survives_and_a_failed_check_does_not_take_a_pass_back(space, capsys):
    minutes = space.minutes_left()
    space.record(passed(FIRST.name))
    space.record(passed(bugs()[0].name))
    space.record(Grade(FIRST.name, "failed", "It is wrong."))
    again = Workspace(space.folder)
    assert (again.next_exercise(), again.minutes_left()) == (SECOND, minutes - FIRST.minutes)
    assert main(["list"], again) == 0
    out = capsys.readouterr().out
    assert "passed earlier" in out and f"1 of {len(EXERCISES)} have passed" in out
    assert f"1 of {len(bugs())} bugs are fixed" in out
    assert f"about {again.minutes_left()} minutes are left" in out


def test_watch_in_one_terminal_and_commands_in_another_see_and_keep_each_others_progress(space):
    watching, other = Workspace(space.folder), Workspace(space.folder)
    other.record(passed(SECOND.name))
    other.hint(FIRST)
    watching.record(passed(FIRST.name))
    assert watching.next_exercise() == EXERCISES[2]
    assert watching.hint(FIRST) == list(FIRST.hints[:2])
    assert other.progress[FIRST.name].has_passed and other.progress[SECOND.name].has_passed


def test_what_many_commands_change_at_the_same_time_is_all_kept(space):
    def change(number: int) -> None:
        for exercise in EXERCISES[1 + number :: 4]:
            Workspace(space.folder).record(passed(exercise.name))
        Workspace(space.folder).reset(FIRST)

    space.open(FIRST).write_text(TEXT)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change, range(4)))
    assert {name for name, one in space.progress.items() if one.has_passed} == set(BY_NAME) - {FIRST.name}
    assert [path.read_text() for path in (space.folder / ".saved").iterdir()] == [TEXT]


def test_a_command_makes_the_file_once_and_a_reset_loses_nothing(space, capsys):
    assert main([], space) == 0 and main(["check", SECOND.name], space) == 1
    out = capsys.readouterr().out
    assert f"notebooks/{SECOND.notebook}.ipynb" in out and f"{space.file(SECOND)}" in out
    assert space.file(SECOND).read_text() == generated(SECOND)
    assert Workspace(space.folder).progress[SECOND.name].state == "unsolved"
    assert space.reset(FIRST) is None  # unchanged
    for copy in (1, 2):
        space.file(FIRST).write_text(TEXT * copy)
        assert main(["reset", FIRST.name], space) == 0
        assert f"{FIRST.name}.{copy}.py" in capsys.readouterr().out
    assert space.file(FIRST).read_text() == generated(FIRST)
    assert [path.read_text() for path in sorted((space.folder / ".saved").iterdir())] == [TEXT, TEXT * 2]


@pytest.mark.parametrize("damage", ["{", "[]", f'{{"{FIRST.name}": {{"unknown": 1}}}}'])
def test_damaged_progress_is_set_aside_with_one_sentence(space, capsys, damage):
    space.progress_file.write_text(damage)
    again = Workspace(space.folder)
    assert again.progress[FIRST.name].state == "not checked"
    assert "was damaged" in (text := capsys.readouterr().err) and text.count("\n") == 1
    assert (space.folder / ".progress.damaged.json").exists()


def test_the_solution_is_shown_after_passing_or_when_asked_twice(space, capsys):
    assert main(["solution", FIRST.name], space) == 1
    assert "def " not in capsys.readouterr().out
    assert main(["solution", FIRST.name], space) == 0
    assert f"def {FIRST.function}" in capsys.readouterr().out
    assert space.solution(SECOND) is None
    space.record(passed(SECOND.name))
    assert space.solution(SECOND) is not None


@pytest.mark.parametrize("misspelt, nearest", [("ring_al_gather", "ring_all_gather"), ("qqq", None)])
def test_a_misspelt_name_is_answered_with_the_nearest_one(space, capsys, misspelt, nearest):
    with pytest.raises(SystemExit):
        main(["check", misspelt], space)
    said = capsys.readouterr().err
    assert f"There is no exercise {misspelt!r}" in said
    assert (f"did you mean {nearest}?" if nearest else f"{misspelt!r}.") in said


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
    done = python("-c", code)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert 'make exercises ARGS="watch zero1"' in done.stderr and "activate" in done.stderr


def test_a_folder_whose_files_are_in_other_places_is_refused_with_the_one_that_was_meant(tmp_path, capsys):
    file = tmp_path / "exercises" / FIRST.file
    file.parent.mkdir(parents=True)
    file.touch()
    assert main(["check", FIRST.name, "--submission", str(tmp_path)]) == 2
    assert f"did you mean {tmp_path / 'exercises'}?" in capsys.readouterr().err


def test_what_was_handed_in_is_graded_with_credit_and_the_graders_progress_stays(tmp_path, capsys):
    gpipe, space = BY_NAME["pipeline_gpipe"], Workspace(tmp_path / "own")
    handed_in = tmp_path / "handed_in"
    (handed_in / gpipe.file).parent.mkdir(parents=True)
    (handed_in / gpipe.file).write_text(generated(gpipe))
    assert main(["check", "--all", "--json", "--submission", str(handed_in)], space) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["credit"] == 0.0
    states = {row["name"]: (row["state"], row["sentence"]) for row in report["exercises"]}
    assert list(states) == [exercise.name for exercise in EXERCISES]
    assert states["pipeline_gpipe"][0] == "unsolved" and "There is no file" in states["pipeline_1f1b"][1]
    assert space.progress[gpipe.name].state == "not checked" and not space.folder.exists()


def test_watching_grades_each_save_and_ctrl_c_ends_it(space):
    def watch(cluster: Cluster, folder: Path) -> tuple[int, str]:
        shown, file = io.StringIO(), Workspace(folder).file(FIRST)

        def learn() -> None:
            for text in ("def (\n", None):
                before = shown.getvalue().count("Ctrl-C ends")
                while shown.getvalue().count("Ctrl-C ends") == before:
                    time.sleep(0.01)
                file.write_text(text) if text else os.kill(os.getpid(), signal.SIGINT)

        # A shell starts background jobs with Ctrl-C ignored, and their processes inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with redirect_stdout(shown), replaced("exercises.commands.warm_up", lambda exercise: None):
            threading.Thread(target=learn, daemon=True).start()
            code = main(["watch"], Workspace(folder))
        return code, shown.getvalue()

    [(code, shown)] = run_ranks(watch, 1, space.folder, backend=None)
    words = (f"Watching {space.file(FIRST)}", "Grading", "is not written yet", "Ctrl-C ends")
    words += ("Grading", "is not Python", "Ctrl-C ends")
    for said, line in zip(words, shown.splitlines(), strict=False):
        assert said in line
    assert code == 0 and shown.endswith("\nStopped watching.\n")


def test_after_a_pass_it_names_what_may_be_opened_and_the_next_exercise(space, capsys, monkeypatch):
    exercise, other = BY_NAME["tree_broadcast"], BY_NAME["binomial_tree"]
    space.open(exercise).write_text(solved(exercise))
    monkeypatch.setattr(commands, "grade", lambda exercise, file, tell: passed(exercise.name))
    assert main(["watch", exercise.name], space) == 0
    out = capsys.readouterr().out
    assert "solution tree_broadcast" in out and f"Open comm/algorithms/tree.py after {other.name}." in out
    assert out.endswith(f"Next: python -m exercises watch {FIRST.name}\n")
    space.record(passed(other.name))
    tell_next(space, other, passed(other.name))
    assert "You may open comm/algorithms/tree.py now." in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_nearest_one(space, capsys):
    for arguments, meant in (
        (["chek", "zero1"], "did you mean check?"),
        (["zero1"], "did you mean watch zero1?"),
    ):
        assert main(arguments, space) == 2
        assert meant in capsys.readouterr().err


def test_without_a_name_hint_and_check_are_for_what_was_worked_on_last_and_say_so(space, capsys):
    bug = bugs()[3]
    assert main(["bug", bug.name], space) == 0 and main(["hint"], space) == 0
    assert f"{bug.name}: " in capsys.readouterr().out
    assert chosen(space, None) == bug
    space.record(passed(bug.name))
    assert chosen(space, None) == FIRST
