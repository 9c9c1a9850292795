"""A notebook names exercises and bugs that exist."""

import re

import nbformat
import pytest

from exercises.names import all_exercises
from tests.notebooks.books import BOOKS, NAMES

PLACES = (
    r'check\(\w+, "(\w+)"\)',
    r"exercises (?:watch|check|hint|bug) ([a-z]\w*)",
    r"ARGS='(?:watch|check|hint|bug)\s+(?:#\s+)?(\w+)'",
    r"\b(bug_\w+_[0-9a-f]{3})\b",
    r"exercises/\w+/(\w+)\.py\b",
)


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_each_exercise_that_a_notebook_names_exists(book):
    text = book.with_suffix(".py").read_text("utf-8")
    named = {name for place in PLACES for name in re.findall(place, text)}
    assert named <= all_exercises().keys()


def prose_of(book) -> str:
    """Return the text of a notebook, in which a line break is a blank."""
    cells = nbformat.read(book, 4).cells
    return " ".join(" ".join(cell.source.split()) for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_notebook_says_the_minutes_that_the_exercise_says(book):
    for name, minutes in re.findall(r"`(\w+)`(?:\*\*)?,? \(?(\d+) minutes", prose_of(book)):
        assert int(minutes) == all_exercises()[name].minutes, name


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_notebook_says_the_symptom_that_the_bug_has(book):
    for name, symptom in re.findall(r"(bug_\w+_[0-9a-f]{3})'?`[^\"]*\"([^\"]+)\"", prose_of(book)):
        assert f"{symptom}." == all_exercises()[name].symptom.lower()
