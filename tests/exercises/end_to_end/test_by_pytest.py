"""Graders run exercises with plain pytest, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.catalog import BY_NAME, ROOT
from exercises.find_the_bug import bugs
from exercises.generate import generated
from tests.exercises.in_process import solved

GPIPE, ONE_F_ONE_B = BY_NAME["pipeline_gpipe"], BY_NAME["pipeline_1f1b"]


@pytest.fixture
def handed_in(tmp_path) -> Path:
    """A folder with one exercise that is not written, and one whose rows do their backwards in reverse."""
    reversed_backwards = solved(GPIPE).replace(
        "return table", "return [row[: len(row) // 2] + row[: len(row) // 2 - 1 : -1] for row in table]"
    )
    for exercise, text in ((GPIPE, reversed_backwards), (ONE_F_ONE_B, generated(ONE_F_ONE_B))):
        (tmp_path / exercise.file).parent.mkdir(exist_ok=True)
        (tmp_path / exercise.file).write_text(text)
    return tmp_path


def test_what_was_handed_in_is_graded_by_marker_with_an_exit_code_a_report_and_partial_credit(handed_in):
    report = handed_in / "report.json"
    options = ["--submission", str(handed_in), "--exercise-report", str(report), "-p", "no:cacheprovider"]
    chosen = ["exercises/pipeline_parallel", "-m", "pipeline_gpipe or pipeline_1f1b"]
    command = [sys.executable, "-m", "pytest", *chosen, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout and "exercises/conftest.py:" not in done.stdout
    found = json.loads(report.read_text())
    states = {row["name"]: (row["state"], row["credit"]) for row in found["exercises"]}
    assert states == {"pipeline_gpipe": ("failed", 0.5), "pipeline_1f1b": ("unsolved", 0.0)}
    assert found["credit"] == 0.25
    assert "0.50  pipeline_gpipe: 1 of 2 tests" in done.stdout
    assert "gpipe(2, 2), rank 0, slot 2: 0B0 is expected, but the row has 0B1 there." in done.stdout


def test_a_lessons_marker_chooses_its_exercises_and_leaves_out_bugs_that_have_been_opened():
    bug = next(bug for bug in bugs() if bug.target.startswith("pipeline_parallel."))
    file = ROOT / "exercises" / bug.file
    existed = file.exists()
    file.parent.mkdir(exist_ok=True)
    if not existed:
        file.write_text(bug.own_file())
    chosen = ["exercises", "-m", "pipeline_parallel", "--collect-only", "-p", "no:cacheprovider"]
    try:
        command = [sys.executable, "-m", "pytest", *chosen]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    finally:
        if not existed:
            file.unlink()
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(files) > 5 and all(name.startswith("exercises/pipeline_parallel/") for name in files)
