"""Each notebook goes from a question through predictions, runs and a picture to exercises and papers."""

import re
import tomllib

import pytest

from exercises.names import all_exercises
from lab.notebook import KERNEL
from tests.notebooks.books import BOOKS, NAMES, ROOT, cells_of

README = (ROOT / "notebooks" / "README.md").read_text("utf-8")
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
BELIEFS = re.findall(r'^\| "(.+?)" \| (.+) \| \[\d\d\]\((\w+)\.ipynb\): (.+) \|$', README, re.M)


def outputs_of(cells: list) -> str:
    """Return the text of all outputs."""
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs)


def prose_of(cells: list) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def section_of(cells: list, heading: str) -> list:
    """Return the cells from a heading to the next one. A cell with several headings is cut at them."""
    current, found = "", []
    for cell in cells:
        parts = [cell.source] if cell.cell_type == "code" else re.split(r"^(?=## )", cell.source, flags=re.M)
        for part in parts:
            if cell.cell_type == "markdown" and part.startswith("## "):
                current = part.removeprefix("## ").partition("\n")[0]
            if current == heading and part:
                found.append(type(cell)(cell, source=part))
    return found


def plain(text: str) -> str:
    return re.sub(r"[\s*]+", " ", text).lower()


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_its_cells_were_executed_in_order_and_without_an_error(book):
    code = [cell for cell in cells_of(book) if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [one for cell in code for one in cell.outputs if one.output_type == "error"]


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_it_begins_with_a_question_and_the_minutes_that_the_readme_says(book):
    first = cells_of(book)[0].source
    assert re.search(r"^\*\*Question\.\*\* [^#]*?\?", first, re.M)
    [minutes] = re.findall(r"about (\d+) minutes", prose_of(cells_of(book)[:2]))
    assert f"({book.name}) | {minutes} |" in README and 20 <= int(minutes) <= 40


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_it_opens_in_colab_and_codespaces_where_its_first_cell_fetches_the_workbook(book):
    first = cells_of(book)[0].source
    project = ADDRESS.removeprefix("https://github.com/")
    assert f"/github/{project}/blob/main/notebooks/{book.name})" in first
    assert f"https://codespaces.new/{project})" in first
    start = next(cell.source for cell in cells_of(book) if cell.cell_type == "code")
    lines = [line.strip() for line in start.splitlines()]
    assert lines[:3] == ["try:", "import lab", "except ImportError:"] and lines[8].startswith("!git clone")
    assert KERNEL in lines[5] and not any(line[:1] in "!%" for line in lines[:8])
    assert lines[8].endswith(ADDRESS) and lines[9] == f"%run {project.partition('/')[2]}/notebooks/colab.py"
    assert "\n%load_ext lab.notebook\n%ranks " in start


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_at_least_three_predictions_are_typed_before_the_result_and_compared_with_it(book):
    waiting, compared = set(), 0
    for cell in cells_of(book):
        if cell.cell_type != "code":
            continue
        for name in re.findall(r"^(\w+)\.compare\(", cell.source, re.M):
            assert name in waiting, f"{name} is compared without a prediction in a cell before"
            assert re.search(r"^predicted .*\n(measured|formula) ", outputs_of([cell]), re.M)
            waiting.remove(name)
            compared += 1
        waiting.update(re.findall(r"^(\w+) = predict\(", cell.source, re.M))
    assert not waiting, "a prediction is never compared"
    assert compared >= 3


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_run_makes_a_picture_and_each_picture_has_a_text(book):
    outputs = [one for cell in cells_of(book) if cell.cell_type == "code" for one in cell.outputs]
    pictures = [one for one in outputs if "image/png" in one.get("data", {})]
    assert pictures
    for picture in pictures:
        assert len(picture.metadata["image/png"]["alt"]) >= 40
    assert "![" not in prose_of(cells_of(book)), "a picture that no run has made"


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_it_links_to_lesson_files_that_exist(book):
    links = re.findall(r"\]\(((?:\.\./)?[\w./]+?)(?:#[\w-]+)?\)", prose_of(cells_of(book)))
    assert not [link for link in links if not (book.parent / link).exists()]
    parallel = "data|tensor|pipeline|hybrid|context|expert"
    lessons = rf"\.\./(lab|comm|zero|low_communication|({parallel})_parallel)/.+\.(py|md)"
    assert any(re.fullmatch(lessons, link) for link in links)


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_it_ends_with_at_most_three_exercises_further_reading_and_the_next_notebook(book):
    cells = cells_of(book)
    exercises = section_of(cells, "Exercises")
    named = set(re.findall(r"`(\w+)`|check\(\w+, \"(\w+)\"\)", prose_of(exercises)))
    assert {name for names in named for name in names} & all_exercises().keys()
    numbers = re.findall(r"^(\d)\. ", prose_of(exercises), re.M)
    assert numbers == [str(i + 1) for i in range(len(numbers))] and len(numbers) <= 3

    headings = re.findall(r"^## (.+)", prose_of(cells), re.M)
    assert headings[-2] == "Exercises" and "further reading" in headings[-1].lower()
    reading = prose_of(section_of(cells, headings[-1]))
    assert "http" in reading
    assert re.search(r"Next: \[\d\d ", reading) or book == BOOKS[-1]


def test_each_notebook_tests_a_belief():
    assert len(BELIEFS) == README.count('| "') >= 14
    assert {name for _, _, name, _ in BELIEFS} == set(NAMES)


@pytest.mark.parametrize(("belief", "result", "name", "heading"), BELIEFS, ids=[row[0] for row in BELIEFS])
def test_a_section_tests_the_belief_by_a_run(belief, result, name, heading):
    section = section_of(cells_of(ROOT / "notebooks" / f"{name}.ipynb"), heading)
    assert section, f"{name} has no section {heading!r}"
    assert plain(belief) in plain(prose_of(section))
    code = "\n".join(cell.source for cell in section if cell.cell_type == "code")
    assert " = predict(" in code and ".compare(" in code
    for number in re.findall(r"`([\d.]+)`", result):
        assert re.search(rf"(?<![\d.]){number}(?![\d.])", outputs_of(section)), number
