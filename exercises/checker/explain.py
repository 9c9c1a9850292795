"""Say in one sentence why a test failed with the learner's function."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from exercises.catalog import Exercise
from exercises.checker.inspect_file import shown
from exercises.generate import missing

_CELL = r"[^\s\"]*/ipykernel_\d+/\d+\.py|<ipython-input-[^>\s]+>"
_HANGS = "no answer within"


def own_line(file: Path, text: str) -> str:
    """Return the innermost line of the learner's code in a traceback or in a hang's report, or "".

    It is "line 12 of ring.py" or, if `file` is a pickle with functions of a notebook, "line 12 of your cell".
    """
    names = re.escape(str(file.resolve()))
    if file.suffix != ".py":
        functions: dict[str, Callable[..., Any]] = cloudpickle.loads(file.read_bytes())
        codes = [getattr(function, "__code__", None) for function in functions.values()]
        files = {code.co_filename for code in codes if code is not None}
        names = "|".join([*map(re.escape, sorted(files)), _CELL])
    in_traceback = re.findall(rf'File "({names})", line (\d+)', text)
    in_report = re.findall(rf"({names}):(\d+) in", text)
    if not (found := in_traceback[-1:] or in_report[:1]):
        return ""
    [(name, line)] = found
    return f"line {line} of {'your cell' if re.fullmatch(_CELL, name) else Path(name).name}"


class Explanation(NamedTuple):
    """A failed test in one sentence, and a drawing of several lines where that says more.

    `reason` is the part of the sentence that says what differs, without the test and the likely cause.
    """

    state: str
    sentence: str
    drawing: str = ""
    reason: str = ""


def explain(exercise: Exercise, file: Path, test: dict[str, Any]) -> Explanation:
    """Explain a failed test, from its message (run_tests.py)."""
    failure = test["failure"]
    text, rank = failure["text"], failure["rank"]
    trace = failure["trace"] if rank is None else text
    for unwritten in (missing(exercise, target) for target in exercise.targets):
        if "NotImplementedError" in trace and unwritten in trace:
            return Explanation("unsolved", unwritten, reason=unwritten)
    if hangs := text.startswith(_HANGS):
        reason = _hang(file, text, is_wait=bool(failure["drawing"]))
    elif failure["difference"] is None:
        reason = text.splitlines()[0]  # a rank was killed
    else:
        at = own_line(file, trace)
        where = " at ".join(filter(None, ("" if rank is None else f"rank {rank}", at)))
        outside = ", outside of your function" if failure["is_error"] and not at else ""
        reason = (
            f"{where}: {failure['difference']}{outside}" if where else f"{failure['difference']}{outside}"
        )
    stop = "" if reason.endswith((".", "?", "!")) else "."
    sentence = f'With your `{exercise.function}`, "{name_of(test["id"])}" does not hold: {reason}{stop}'
    told = " ".join(filter(None, (sentence, failure["cause"])))
    return Explanation("hangs" if hangs else "failed", told, failure["drawing"], reason + stop)


def load_error(file: Path, failure: dict[str, Any]) -> str:
    """Return the sentence for a learner's file that cannot be imported."""
    at = own_line(file, failure["trace"])
    return f"{shown(file)} cannot be imported: {at + ': ' if at else ''}{failure['difference']}."


def name_of(test: str) -> str:
    """Return a test's name in words: "ring all reduce equals one process"."""
    name, _, parameters = test.rpartition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters.rstrip(']')})" if parameters else words


def _hang(file: Path, text: str, is_wait: bool) -> str:
    """Return what the report of a hang says: where a rank computes without an end, or where each one is."""
    blocks = re.split(r"\n  (?=rank \d+\b(?! keeps the others waiting))", text)[1:]
    if computing := [block for block in blocks if re.match(r"rank \d+ is still computing ", block)]:
        rank, _, at = _place(file, computing[0]).removeprefix("rank ").partition(" ")
        return f"rank {rank} is still computing {at}: look for a loop without an end."
    what = "the ranks wait for one another" if is_wait else "the ranks do not end"
    return f"{what}: {', '.join(_place(file, block) for block in blocks)}."


def _place(file: Path, block: str) -> str:
    """Return where a rank is, in the learner's code if it is called there: "rank 0 at line 12 of ring.py"."""
    rank = re.match(r"rank \d+", block)
    inner = re.search(r"([^/\n]+\.py):(\d+) in", block)
    if rank and (line := own_line(file, block)):
        return f"{rank[0]} at {line}"
    if rank and inner:
        return f"{rank[0]} outside of your function, at line {inner[2]} of {inner[1]}"
    return block.splitlines()[0]
