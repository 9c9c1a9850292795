"""The command of a week in docs/course.md collects the week's exercises and bugs in a fresh clone."""

import re
import subprocess
import sys

from exercises.catalog import ROOT


def test_the_command_of_a_week_grades_its_exercises_and_its_bugs_in_a_fresh_clone():
    page = (ROOT / "docs" / "course.md").read_text()
    weeks = re.findall(r'^pytest (exercises -m )"(.+)"  # week 4$', page, re.MULTILINE)
    [names] = {expression for _, expression in weeks if "balance_experts" in expression}
    command = [sys.executable, "-m", "pytest", "exercises", "--collect-only", "-q", "-m", names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r"^exercises/\w+/(\w+)\.py: \d", done.stdout, re.MULTILINE)
    assert set(found) == set(names.split(" or ")), done.stdout + done.stderr
