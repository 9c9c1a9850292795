"""The plans of courses have every notebook, and each exercise after what it needs."""

import re
import subprocess
import sys
import zipfile

import pytest

from exercises.catalog import EXERCISES, ROOT
from exercises.names import all_exercises
from exercises.pages import BOOKS, PLANS

PAGE = (ROOT / "docs" / "course.md").read_text()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.title)
def test_a_plan_has_all_notebooks_in_order_and_each_exercise_after_what_it_needs(plan):
    text = PAGE.partition(f"### {plan.title}\n")[2].partition("\n###")[0].partition("\n## ")[0]
    rows = [line.split("|")[1:6] for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row[0].strip() for row in rows] == [f"{n} {title}" for n, (title, _) in enumerate(plan.weeks, 1)]
    assert re.findall(r"\d\d", "".join(row[1] for row in rows)) == [book[:2] for book in BOOKS]
    [hours] = re.findall(r"at most (\d+) hours", text)
    assert all(int(row[4]) <= 60 * int(hours) for row in rows)
    names = [name for row in rows for cell in row[2:4] for name in re.findall(r"`(\w+)`", cell)]
    assert len(set(names)) == len(names)
    for position, name in enumerate(names):
        assert set(all_exercises()[name].needs) & set(names) <= set(names[:position]), name


def test_a_name_in_a_weeks_command_that_is_no_exercise_is_refused():
    command = [sys.executable, "-m", "pytest", "exercises", "-m", "bucket_layout or bukcet_views"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "'bukcet_views': did you mean bucket_views?" in done.stderr


def test_a_term_has_every_exercise():
    term = PAGE.partition("### Fourteen weeks\n")[2]
    assert {exercise.name for exercise in EXERCISES} <= set(re.findall(r"`(\w+)`", term))


def test_the_archive_of_a_student_has_the_files_of_every_lesson(tmp_path):
    files = {exercise.file.as_posix() for exercise in all_exercises().values()}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    [command] = re.findall(r"^python (-m zipfile .*)$", PAGE, re.MULTILINE)
    subprocess.run(["bash", "-c", f"{sys.executable} {command}"], cwd=tmp_path, check=True)
    assert files <= set(zipfile.ZipFile(tmp_path / "my_name.zip").namelist())
