"""The README is short and leads everywhere, and pages list every RUN_MODE, notebook and exercise."""

import re
import runpy
import subprocess
import sys
import tomllib
import zipfile

import pytest

from exercises import pages
from exercises.catalog import EXERCISES
from exercises.names import all_exercises
from exercises.pages import BOOKS, PLANS
from lab.what_changed import SHORT
from tests.run_modes import MODES, ROOT, SCRIPTS, python
from tests.test_layout import FLOORS
from training.compare import NO_TIMELINE

TOP = (ROOT / "README.md").read_text()
LESSONS = sorted({script.partition("/")[0] for _, script, _ in MODES})


def rows_of(text: str, folder: str = "") -> list[tuple[str, str, str]]:
    """Return the RUN_MODE, script and description in each row of a table of lessons."""
    rows = re.findall(r"^\| `(\w+)` \| \[([^]]+)\]\((?:\.\./)?\2\)[^|]* \| (.+) \|$", text, re.MULTILINE)
    return [(mode, folder + script, what.replace("`", "")) for mode, script, what in rows]


def test_the_readme_is_read_in_five_minutes_and_says_what_to_run_first_second_and_third():
    assert len(TOP.splitlines()) <= 150 and len(TOP.split()) <= 1200
    commands = [
        line.split("#")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", TOP, re.DOTALL)
        for line in block.splitlines()
    ]
    clone, *first_three, containers = commands
    listed = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert first_three == [f"make {target}" for target in listed[:3]]
    assert first_three == ["make run", "make notebooks", "make exercises"]
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert clone == f"git clone {address} && cd {address.rpartition('/')[2]}"
    assert "docker-compose up" in containers


def test_the_readme_leads_to_every_page():
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert there and there <= set(re.findall(r"\]\(([^)#]+)\)", TOP))


def test_the_readme_s_picture_shows_the_messages_of_the_ring():
    assert (
        runpy.run_path(str(ROOT / "site" / "animation.py"))["svg"]()
        == (ROOT / "docs/all_reduce.svg").read_text()
    )


def test_a_page_lists_the_lessons_of_entrypoint_in_its_words():
    assert rows_of((ROOT / "docs" / "running.md").read_text()) == MODES


def test_the_page_of_ways_to_run_says_which_names_compare_and_diff_accept():
    page = (ROOT / "docs" / "running.md").read_text()
    section = page.partition("\n## Several scripts")[2].partition("\n## ")[0]
    assert {*SHORT, *NO_TIMELINE} <= set(re.findall(r"`(\w+)`", section))


@pytest.mark.parametrize("folder", [lesson for lesson in LESSONS if lesson != "comm"])
def test_the_readme_of_a_folder_lists_its_lessons(folder: str):
    listed = rows_of((ROOT / folder / "README.md").read_text(), f"{folder}/")
    assert [row[:2] for row in listed] == [row[:2] for row in MODES if row[1].startswith(f"{folder}/")]


def test_the_map_has_every_notebook_in_order():
    notebooks = [f"notebooks/{book.name}" for book in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert re.findall(r"\[\d\d\]\((notebooks/.+?)\)", TOP) == notebooks


def test_what_comes_from_the_catalogue_is_up_to_date():
    """The minutes of the map, the route of each lesson, and the plans of courses."""
    old = [path for path, text in pages.pages().items() if path.read_text("utf-8") != text]
    assert not old, "run `python -m exercises.pages`"


def test_the_map_says_how_long_the_notebooks_and_the_exercises_of_a_lesson_take():
    [row] = [line for line in TOP.splitlines() if "(data_parallel/README.md)" in line and "04" in line]
    books = sum(minutes for book, (_, minutes) in pages.BOOKS.items() if book[:2] in ("04", "05"))
    there = [exercise.minutes for exercise in EXERCISES if exercise.file.parts[0] == "data_parallel"]
    assert f": {books} minutes | {len(there)} exercises: {sum(there)} minutes |" in row


@pytest.mark.parametrize("folder", LESSONS)
def test_a_lesson_s_sections_name_notebooks_exercises_and_files_in_the_order_of_its_route(folder: str):
    """A notebook stands before its exercises, these before the file that has their solution and is read."""
    page = (ROOT / folder / "README.md").read_text()
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert titles[1:3] == ["The route", "What to run"]
    route, _, rest = page.partition("\n## What to run\n")
    sections = rest.partition("\n## ")[2]
    there = {one.name: one for one in EXERCISES if one.file.parts[0] == folder}
    named = []
    for paragraph in re.finditer(r"\*\*Write\*\*.*\n(?:.+\n)*", sections):
        for name in re.findall(r"`(\w+)`", paragraph[0]):
            file = there[name].lesson.relative_to(ROOT / folder).as_posix()
            assert f"]({file})" not in sections[: paragraph.end()], name
            assert f"/{there[name].notebook}.ipynb)" in sections[: paragraph.end()], name
            named.append(name)
    assert named == list(there)
    files = re.findall(r"\]\(([\w/]+\.py)\)", route)
    assert files == sorted(files, key=lambda file: sections.index(f"]({file})"))
    read = "".join(re.findall(r"\*\*Read\*\*.*\n(?:.+\n)*", sections))
    assert set(files) <= set(re.findall(r"\]\(([\w/]+\.py)\)", read))
    predicted = re.findall(r"\*\*Predict\*\* with [^.]*?\(\.\./notebooks/(\w+)\.ipynb\)", sections)
    assert len(predicted) == sections.count("**Predict**")
    assert set(re.findall(r"/(\w+)\.ipynb\)", route)) <= set(predicted)


def test_the_changelog_names_every_lesson():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not {mode for mode in SCRIPTS if f"`{mode}`" not in changelog}


def test_the_newest_entry_of_the_changelog_and_the_citation_have_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [newest, *_] = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest == cited == version


def test_how_to_add_a_lesson_has_steps_in_order_and_names_what_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]
    assert steps and steps == list(range(1, len(steps) + 1))
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"`make ([a-z ]+)`", page)
    assert commands and {word for command in commands for word in command.split()} <= set(targets)
    paths = [name for name in re.findall(r"`([\w./]+)`", page) if name.endswith(("/", ".sh"))]
    assert paths and all((ROOT / path).exists() for path in paths)
    assert {script.partition("/")[0] + "/" for script in SCRIPTS.values()} <= set(paths)


DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_it_draws_the_floors_that_an_import_may_not_climb():
    drawing = DESIGN.partition("never up or sideways:\n\n```\n")[2].partition("```")[0]
    _, *floors = drawing.splitlines()
    assert [set(line.split()) for line in reversed(floors)] == list(FLOORS)


def test_it_names_every_floor_of_the_house_and_files_that_exist():
    house = DESIGN.partition("\n## The house\n")[2].partition("\nAn import")[0]
    named = set(re.findall(r"`([\w.]+/[\w./]*)`", DESIGN))
    assert {f"{folder}/" for floor in FLOORS for folder in floor} <= named & set(
        re.findall(r"`(.+?)`", house)
    )
    assert not [name for name in named if not (ROOT / name).exists()]


def test_its_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = set(re.findall(r"`make ([\w-]+)`", DESIGN))
    assert commands and commands <= set(targets)


def test_it_is_read_in_half_an_hour():
    assert len(DESIGN.splitlines()) <= 200


COURSE = (ROOT / "docs" / "course.md").read_text()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.title)
def test_a_plan_has_all_notebooks_in_order_and_each_exercise_after_what_it_needs(plan):
    text = COURSE.partition(f"### {plan.title}\n")[2].partition("\n###")[0].partition("\n## ")[0]
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
    done = python("-m", "pytest", "exercises", "-m", "bucket_layout or bukcet_views")
    assert done.returncode and "'bukcet_views': did you mean bucket_views?" in done.stderr


def test_a_term_has_every_exercise():
    term = COURSE.partition("### Fourteen weeks\n")[2]
    assert {exercise.name for exercise in EXERCISES} <= set(re.findall(r"`(\w+)`", term))


def test_the_archive_of_a_student_has_the_files_of_every_lesson(tmp_path):
    files = {exercise.file.as_posix() for exercise in all_exercises().values()}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    [command] = re.findall(r"^python (-m zipfile .*)$", COURSE, re.MULTILINE)
    subprocess.run(["bash", "-c", f"{sys.executable} {command}"], cwd=tmp_path, check=True)
    assert files <= set(zipfile.ZipFile(tmp_path / "my_name.zip").namelist())
