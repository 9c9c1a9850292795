"""An exercise is graded by the lesson's own tests, on real ranks."""

import os

from exercises.catalog import BY_NAME, ROOT
from tests.exercises.test_grade import RING, graded, solved


def test_the_lessons_code_passes_from_end_to_end(tmp_path):
    result = graded(tmp_path, RING, solved(RING))
    assert (result.state, result.credit, result.passed) == ("passed", 1.0, RING.tests)
    assert result.is_beyond and "a rank sends at most 3.0 MB in 3 messages, the fewest" in result.sentence


def test_an_exercise_that_this_machine_cannot_run_says_so(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nvars(os).pop('memfd_create', None)\n"
    )  # as on macOS
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    exercise = BY_NAME["ring_buffer"]
    result = graded(tmp_path, exercise, solved(exercise))
    assert (result.state, result.credit) == ("invalid", 0.0)
    assert result.sentence.startswith("This machine cannot run the test ")
    assert result.sentence.endswith(": the segments are Linux's.")
