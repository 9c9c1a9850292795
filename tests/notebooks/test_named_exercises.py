"""A notebook names exercises and bugs that exist."""

import inspect
import pydoc
import re

import pytest

from exercises.catalog import BY_NAME
from exercises.names import all_exercises
from tests.notebooks.books import BOOKS, NAMES, cells_of, text_of

PLACES = (
    r'check\(\w+, "(\w+)"\)',
    r"exercises (?:watch|check|hint|bug) ([a-z]\w*)",
    r"ARGS='(?:watch|check|hint|bug)\s+(\w+)'",
    r"\b(bug_\w+_[0-9a-f]{3})\b",
    r"exercises/\w+/(\w+)\.py\b",
)


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_each_exercise_that_a_notebook_names_exists(book):
    named = {name for place in PLACES for name in re.findall(place, text_of(book))}
    assert named <= all_exercises().keys()


def prose_of(book) -> str:
    """Return the text of a notebook, in which a line break is a blank."""
    texts = [cell.source for cell in cells_of(book) if cell.cell_type == "markdown"]
    return " ".join(" ".join(texts).split())


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_the_end_of_a_notebook_names_exercises_in_the_order_of_the_catalogue(book):
    end = prose_of(book).partition("## Exercises")[2].partition("## Further reading")[0]
    named = [name for name in dict.fromkeys(re.findall(r"`(\w+)`", end)) if name in BY_NAME]
    assert named == [name for name in BY_NAME if name in named]


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_notebook_says_the_minutes_of_an_exercise_and_the_symptom_of_a_bug(book):
    prose = prose_of(book)
    for name, minutes in re.findall(r"`(\w+)`(?:\*\*)?,? \(?(\d+) minutes", prose):
        assert int(minutes) == all_exercises()[name].minutes, name
    for name, symptom in re.findall(r"(bug_\w+_[0-9a-f]{3})'?`[^\"]*\"([^\"]+)\"", prose):
        assert f"{symptom}." == all_exercises()[name].symptom.lower()


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_function_to_write_in_a_cell_has_the_parameters_of_the_lesson(book):
    text = text_of(book)
    for call in re.finditer(r'check\((\w+), "(\w+)"\)', text):
        function, name = call.groups()
        *_, parameters = re.findall(rf"def {function}\((.*)\)", text[: call.start()])
        written = [one.partition(":")[0] for one in parameters.split(", ")]
        assert written == list(inspect.signature(pydoc.locate(all_exercises()[name].target)).parameters)
