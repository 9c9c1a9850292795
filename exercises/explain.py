"""Say in one sentence why a test failed with the learner's function."""

import re
from pathlib import Path
from typing import Any

from exercises.catalog import Exercise
from exercises.generate import missing
from exercises.inspect_file import shown

_ERROR_LINE = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit|Failed))\b(?:: |$)", re.M)
_FACTOR = re.compile(r"(\S+) times what it should be")


def explain(exercise: Exercise, file: Path, test: dict[str, Any]) -> tuple[str, str]:
    """Return the state and the sentence for a failed test of exercises/replacing_plugin.py's report."""
    failure = test["failure"]
    text, trace = failure["text"], failure["trace"]
    for unwritten in (missing(exercise, target) for target in exercise.targets):
        if "NotImplementedError" in trace and unwritten in trace:
            return "unsolved", unwritten
    test_name = name_of(test["id"])
    if text.startswith("no answer within"):
        return "hangs", f"{test_name}: the ranks wait for one another: {_stuck(file, text)}."
    rank = failure["rank"]
    if rank is not None and " failed:\n" not in text:
        return "failed", f"{test_name}: {text.splitlines()[0]}"
    who = "" if rank is None else f"rank {rank}"
    at = _own_line(file, text if rank is not None else trace)
    error = _error(text) if rank is not None else _named(failure["type"], text)
    where = " at ".join(filter(None, (who, at)))
    return "failed", f"{test_name}: {where + ': ' if where else ''}{error}"


def most_telling(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the failed test to explain: the first one that names a factor, else the first one."""
    return next((test for test in failures if _FACTOR.search(test["failure"]["text"])), failures[0])


def load_error(exercise: Exercise, file: Path, failure: dict[str, Any]) -> str:
    """Return the sentence for a learner's file that cannot be imported."""
    at = _own_line(file, failure["trace"])
    error = _named(failure["type"], failure["text"])
    return f"{shown(file)} cannot be imported: {at + ': ' if at else ''}{error}"


def name_of(test: str) -> str:
    """Return a test's name in words: "ring all reduce equals one process"."""
    name, _, parameters = test.rpartition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters.rstrip(']')})" if parameters else words


def _error(text: str) -> str:
    """Return the error of a rank's traceback: its class and the lines that say what differs."""
    found = None
    own = text.split("\nAfterwards also: ")[0]
    for found in _ERROR_LINE.finditer(own):  # noqa: B007
        pass
    return _named(found[1], own[found.start() :].partition(": ")[2]) if found else own.splitlines()[-1]


def _named(kind: str, text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return f"{kind}."
    if lines[0].endswith("differ:"):  # as lab.check.assert_same says it, with a line for each tensor
        return f"{kind}: {lines[0]} {'; '.join(lines[1:3])}{_likely_cause(lines[1:])}"
    wanted = [line for line in lines[1:4] if line.startswith(("Mismatched", "Greatest", "Expected"))]
    return f"{kind}: {'; '.join([*lines[:1], *wanted])}"


def _likely_cause(lines: list[str]) -> str:
    """Return what usually makes a tensor n times, or an n-th of, what it should be."""
    found = _FACTOR.search("\n".join(lines))
    factor = float(found[1]) if found else 1.0
    if factor > 1.5 and abs(factor - round(factor)) < 1e-3:
        return ". Is it a sum over ranks that should be a mean, or is it added up more than once?"
    if 0 < factor < 0.7 and abs(1 / factor - round(1 / factor)) < 1e-3:
        return ". Is it divided once too often, or is the part of one rank taken for all?"
    return ""


def _own_line(file: Path, trace: str) -> str:
    """Return the innermost line of the learner's file in a traceback."""
    lines = re.findall(rf'File "{re.escape(str(file.resolve()))}", line (\d+)', trace)
    return f"line {lines[-1]} of {file.name}" if lines else ""


def _stuck(file: Path, text: str) -> str:
    """Return where each rank is stuck, the learner's line if there is one: "rank 0 at line 12 of ring.py"."""
    places = []
    for block in re.split(r"\n  (?=rank )", text)[1:]:
        rank = re.match(r"rank \d+", block)
        own = re.search(rf"{re.escape(str(file.resolve()))}:(\d+) in", block)
        inner = re.search(r"([^/\n]+\.py):(\d+) in", block)
        if rank and own:
            places.append(f"{rank[0]} at line {own[1]} of {file.name}")
        elif rank and inner:
            places.append(f"{rank[0]} at line {inner[2]} of {inner[1]}")
        else:
            places.append(block.splitlines()[0])
    return ", ".join(places)
