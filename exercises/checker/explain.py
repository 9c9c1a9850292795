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
_ERROR_LINE = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit|Failed))\b(?:: |$)", re.M)
_OF_CODE = ("TypeError", "AttributeError", "KeyError", "IndexError", "ValueError")
_HANGS = "no answer within"
_FACTOR = re.compile(r"(\S+) times what it should be")


class OwnCode(NamedTuple):
    """The names, as a regular expression, that Python gives to the files or cells with the learner's code."""

    names: str

    def line_in_traceback(self, trace: str) -> str:
        """Return the innermost line of the learner's code: "line 12 of ring.py", or ""."""
        found = re.findall(rf'File "({self.names})", line (\d+)', trace)
        return _shown(*found[-1]) if found else ""

    def line_in_stack(self, stack: str) -> str:
        """Return the innermost line of the learner's code in one rank's part of a hang's report, or ""."""
        found = re.search(rf"({self.names}):(\d+) in", stack)
        return _shown(found[1], found[2]) if found else ""


def own_code(file: Path) -> OwnCode:
    """Return where the learner's code is: in this file or, for a pickle, where its functions are from."""
    if file.suffix == ".py":
        return OwnCode(re.escape(str(file.resolve())))
    functions: dict[str, Callable[..., Any]] = cloudpickle.loads(file.read_bytes())
    codes = [getattr(function, "__code__", None) for function in functions.values()]
    names = {code.co_filename for code in codes if code is not None}
    return OwnCode("|".join([*map(re.escape, sorted(names)), _CELL]))


def _shown(name: str, line: str) -> str:
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
    text, trace = failure["text"], failure["trace"]
    for unwritten in (missing(exercise, target) for target in exercise.targets):
        if "NotImplementedError" in trace and unwritten in trace:
            return Explanation("unsolved", unwritten, reason=unwritten)
    in_test = f'With your `{exercise.function}`, "{name_of(test["id"])}" does not hold'
    cause = f" {failure['cause']}" if failure["cause"] else ""
    if text.startswith(_HANGS):
        reason = _hang(own_code(file), text)
        cause = cause if reason.startswith("the ranks wait") else ""
        return Explanation("hangs", f"{in_test}: {reason}{cause}", failure["drawing"], reason)
    rank = failure["rank"]
    if rank is not None and " failed:\n" not in text:
        reason = text.splitlines()[0]
        return Explanation("failed", f"{in_test}: {reason}{cause}", failure["drawing"], reason)
    at = own_code(file).line_in_traceback(text if rank is not None else trace)
    where = " at ".join(filter(None, ("" if rank is None else f"rank {rank}", at)))
    error = failure["difference"] or (_error(text) if rank is not None else _named(failure["type"], text))
    if not (at or cause or failure["difference"]) and _is_of_code(failure["type"], text):
        line = _outside(text if rank is not None else trace)
        cause = f" The error is outside of your function{line}: look at what it returns or leaves out."
    reason = f"{where and where + ': '}{error}{'' if error.endswith(('.', '?', '!')) else '.'}"
    return Explanation("failed", f"{in_test}: {reason}{cause}", failure["drawing"], reason)


def most_telling(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the failed test to explain: the first, unless only a later one tells a factor or a cause.

    A hang says less than an assertion that has failed without ranks, so it comes after those.
    """
    ended = [test for test in failures if not test["failure"]["text"].startswith(_HANGS)]
    if ended[:1] == failures[:1] and failures[0]["failure"]["cause"]:
        return failures[0]
    found = [test for test in failures if _FACTOR.search(test["failure"]["difference"] or "")]
    found += [test for test in ended if test["failure"]["cause"]]
    if len(ended) < len(failures):
        found += [test for test in ended if _is_of_one_process(test["failure"])]
    found += [test for test in failures if test["failure"]["cause"]]
    return [*found, *failures][0]


def _is_of_one_process(failure: dict[str, Any]) -> bool:
    return failure["rank"] is None and failure["type"] == "AssertionError"


def load_error(exercise: Exercise, file: Path, failure: dict[str, Any]) -> str:
    """Return the sentence for a learner's file that cannot be imported."""
    at = own_code(file).line_in_traceback(failure["trace"])
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
    if lines[0].startswith("DID NOT RAISE"):
        return "there was no error"
    if lines[0].startswith("Regex pattern did not match"):
        expected, got = (line.partition(": ")[2] for line in lines[1:3])
        return f"the error should say {expected}, and says {got}"
    if kind == "AssertionError" and (sides := re.match(r"assert (.+) == (.+)", lines[0])):
        return f"expected {sides[2]}, got {sides[1]}"
    wanted = [line for line in lines[1:4] if line.startswith(("Mismatched", "Greatest", "Expected"))]
    text = "; ".join([*lines[:1], *wanted])
    return text if kind in ("AssertionError", "Failed") else f"{kind}: {text}"


def _outside(trace: str) -> str:
    """Return the innermost line of a traceback: ", in `with model.no_sync():` (line 12 of cases.py)"."""
    found = re.findall(r'File "[^"]*?([^/"]+)", line (\d+), in .*\n\s+(\S.*)', trace)
    return ", in `{2}` (line {1} of {0})".format(*found[-1]) if found else ""


def _is_of_code(kind: str, text: str) -> bool:
    """Return whether the error is one that Python raises where a value is not as the code expects it."""
    return any(f"{name}: " in f"{kind}: {text}" for name in _OF_CODE)


def _hang(own: OwnCode, text: str) -> str:
    """Return what the report of a hang says: which ranks compute without an end, or wait for one another."""
    blocks = re.split(r"\n  (?=rank \d+\b(?! keeps the others waiting))", text)[1:]
    computing = [block for block in blocks if re.match(r"rank \d+ is still computing ", block)]
    if not computing:
        return f"the ranks wait for one another: {', '.join(_place(own, block) for block in blocks)}."
    places: dict[str, list[str]] = {}
    for block in computing:
        rank, _, at = _place(own, block).removeprefix("rank ").partition(" ")
        places.setdefault(at, []).append(rank)
    told = [f"{_ranks(ranks)} still computing {at}" for at, ranks in places.items()]
    return f"{', and '.join(told)}: look for a loop without an end."


def _ranks(numbers: list[str]) -> str:
    *others, last = numbers
    return f"ranks {', '.join(others)} and {last} are" if others else f"rank {last} is"


def _place(own: OwnCode, block: str) -> str:
    """Return where a rank is, in the learner's code if it is called there: "rank 0 at line 12 of ring.py"."""
    rank = re.match(r"rank \d+", block)
    inner = re.search(r"([^/\n]+\.py):(\d+) in", block)
    if rank and (line := own.line_in_stack(block)):
        return f"{rank[0]} at {line}"
    if rank and inner:
        return f"{rank[0]} outside of your function, at line {inner[2]} of {inner[1]}"
    return block.splitlines()[0]
