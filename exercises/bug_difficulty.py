"""Measure how hard a bug is to find and to mend: the difficulty, 1 to 5, of an exercise that has a mistake.

    lines to read       those of the file that has the mistake
    lines to write      those of the lesson's function, or of its methods, that the file does not have
    a slow link         one step more: the mistake shows only in time, or in what arrives late

The two numbers of lines are added up. A file may be shorter than the lesson's for another reason than the
mistake, so this is a measure of the effort and no proof.
"""

import ast
import difflib
import functools
import re
from pathlib import Path

from exercises.bug_hints import Definition, lines_of
from exercises.catalog import ROOT

LINES = (4, 9, 15, 22)  # the most lines of difficulties 1 to 4
MINUTES = (10, 15, 20, 25, 30)
_OF_SLOW_LINKS = re.compile(r"slow|delay|\blink|sleep|Metronome")


def difficulty_of(wrong: ast.Module, function: str, right: Definition, test: str) -> int:
    """Return the difficulty. `wrong` is the learner's file, and `test` the id of the test that must pass."""
    definitions = [node for node in wrong.body if isinstance(node, Definition)]
    [mistaken] = [node for node in definitions if node.name == function]
    lines = sum(len(lines_of(node)) for node in definitions) + _lines_to_write(mistaken, right)
    return min(5, 1 + sum(lines > most for most in LINES) + _needs_a_slow_link(test))


def _lines_to_write(wrong: Definition, right: Definition) -> int:
    if isinstance(wrong, ast.ClassDef):
        methods = {node.name: node for node in right.body if isinstance(node, ast.FunctionDef)}
        changed = [n for n in wrong.body if isinstance(n, ast.FunctionDef) and n.name in methods]
        return sum(_lines_to_write(node, methods[node.name]) for node in changed)
    steps = difflib.SequenceMatcher(None, lines_of(right), lines_of(wrong)).get_opcodes()
    return sum(end - start for kind, start, end, _, _ in steps if kind != "equal")


def _needs_a_slow_link(test: str) -> bool:
    file, _, name = test.partition("::")
    tests = _sources(ROOT / file)
    return bool(_OF_SLOW_LINKS.search(tests.get(name.partition("[")[0], "")))


@functools.cache
def _sources(file: Path) -> dict[str, str]:
    """Return the source of each function of a file, by name."""
    body = ast.parse(file.read_text()).body
    return {node.name: ast.unparse(node) for node in body if isinstance(node, ast.FunctionDef)}
