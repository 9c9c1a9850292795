"""An exercise is graded by the lesson's own tests, on real ranks."""

from tests.exercises.test_grade import RING, graded, solved


def test_the_lessons_code_passes_from_end_to_end(tmp_path):
    result = graded(tmp_path, RING, solved(RING))
    assert (result.state, result.credit, result.passed) == ("passed", 1.0, RING.tests)
    assert result.is_beyond and "a rank sends at most 3.0 MB in 3 messages, the fewest" in result.sentence
