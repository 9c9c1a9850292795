"""Describe the error of a failed test: where it happened, what differs, and what has probably caused it."""

import re
import traceback
from typing import Any

from exercises.causes import likely_cause
from exercises.difference import shown_difference
from exercises.evidence import Evidence
from exercises.explain import name_of
from lab.ranks import RankError
from lab.ranks.compared import compared_in
from lab.ranks.waiting import drawn

_LESSON = re.compile(r"\btests[./](\w+)")


def failure_of(error: BaseException, test: str = "", table: str | None = None) -> dict[str, Any]:
    """Return what grade.py needs to know about an error: where it happened, what differs, what may cause it.

    `test` is the failed test's id, and `table` the learner's wrong schedule, which begins with a sentence.
    """
    own = compared_in(error)
    compared = error.compared if isinstance(error, RankError) else {None: own} if own else {}
    waits = error.waits if isinstance(error, RankError) else {}
    rank = error.rank if isinstance(error, RankError) else None
    lesson = _LESSON.search(test)
    evidence = Evidence(name_of(test), str(error), compared, waits, lesson[1] if lesson else "")
    difference, drawing = shown_difference(compared, rank), ""
    if found := evidence.who_waits():
        drawing = drawn(found)
    if table:
        difference, _, drawing = table.partition("\n")
    return {
        "type": type(error).__name__,
        "rank": rank,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "difference": difference,
        "cause": likely_cause(evidence),
        "drawing": drawing,
    }
