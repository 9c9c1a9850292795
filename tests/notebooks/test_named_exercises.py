"""A notebook names exercises and bugs that exist."""

import re

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
