"""The course page names exercises, bugs and notebooks that exist, and its commands are those that work."""

import re

import pytest

from exercises.catalog import ROOT
from exercises.names import all_exercises

PAGE = (ROOT / "docs" / "course.md").read_text()
PLANS = re.split(r"^## ", PAGE, flags=re.M)[-3:]


@pytest.mark.parametrize("plan, weeks", [*zip(PLANS, (4, 8, 14), strict=True)], ids=("4", "8", "14"))
def test_a_plan_has_all_notebooks_in_order_and_each_exercise_after_what_it_needs(plan, weeks):
    rows = [line.split("|")[1:5] for line in plan.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0].split()[0]) for row in rows] == list(range(1, weeks + 1))
    assert [int(number) for row in rows for number in re.findall(r"\d+", row[1])] == list(range(11))
    columns = [re.findall(r"`(\w+)`", cell) for row in rows for cell in row[2:]]
    for number, names in enumerate(columns):  # exercises, bugs, exercises, ...
        assert {name.startswith("bug_") for name in names} <= {number % 2 == 1}
    names = [name for column in columns for name in column]
    assert len(set(names)) == len(names)
    for position, name in enumerate(names):
        exercise = all_exercises()[name]
        assert set(exercise.needs) & set(names) <= set(names[:position]), name
