"""The pages list every RUN_MODE, every notebook and every exercise, and name what exists."""

import re

import pytest

from exercises.catalog import EXERCISES
from tests.run_modes import MODES, ROOT, SCRIPTS

TOP = (ROOT / "README.md").read_text()
LESSONS = sorted({script.partition("/")[0] for _, script, _ in MODES} - {"comm"})


def rows_of(text: str, folder: str = "") -> list[tuple[str, str, str]]:
    """Return the RUN_MODE, script and description in each row of a table of lessons."""
    rows = re.findall(r"^\| `(\w+)` \| \[([^]]+)\]\(\2\)[^|]* \| (.+) \|$", text, re.MULTILINE)
    return [(mode, folder + script, what.replace("`", "")) for mode, script, what in rows]


def test_the_top_readme_lists_the_lessons_of_entrypoint_in_its_words():
    assert rows_of(TOP) == MODES


@pytest.mark.parametrize("folder", LESSONS)
def test_the_readme_of_a_folder_lists_its_lessons(folder: str):
    listed = rows_of((ROOT / folder / "README.md").read_text(), f"{folder}/")
    assert [row[:2] for row in listed] == [row[:2] for row in MODES if row[1].startswith(f"{folder}/")]


def test_the_map_has_every_notebook_in_order():
    notebooks = [f"notebooks/{book.name}" for book in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert re.findall(r"\[\d\d\]\((notebooks/.+?)\)", TOP) == notebooks


def test_the_map_counts_the_exercises_of_each_lesson():
    counted = dict.fromkeys(LESSONS, 0) | {"comm": 0}
    for folder, number in re.findall(
        r"^\| \d\. \[.+?\]\((\w+)/README.md\) .*\| (\d+) \|$", TOP, re.MULTILINE
    ):
        counted[folder] += int(number)
    there = dict.fromkeys(counted, 0)
    for exercise in EXERCISES:
        there[exercise.target.partition(".")[0]] += 1
    assert counted == there


@pytest.mark.parametrize("folder", ["comm", *LESSONS])
def test_the_story_of_a_folder_names_each_of_its_exercises(folder: str):
    named = set(re.findall(r"`(\w+)`", (ROOT / folder / "README.md").read_text()))
    assert {exercise.name for exercise in EXERCISES if exercise.file.parts[0] == folder} <= named


def test_the_changelog_names_every_lesson():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not {mode for mode in SCRIPTS if f"`{mode}`" not in changelog}


def test_how_to_add_a_lesson_has_ten_steps_and_names_what_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == [str(n) for n in range(1, 11)]
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"`make ([a-z ]+)`", page)
    assert commands and {word for command in commands for word in command.split()} <= set(targets)
    paths = [name for name in re.findall(r"`([\w./]+)`", page) if name.endswith(("/", ".sh"))]
    assert paths and all((ROOT / path).exists() for path in paths)
    assert {script.partition("/")[0] + "/" for script in SCRIPTS.values()} <= set(paths)
