"""Say what the mistake of a bug is, and show the code of the lesson that is right."""

import ast
import difflib
import textwrap
from collections.abc import Iterator

from exercises.bug_hints import Definition
from exercises.find_the_bug import Bug, lessons_definition, wrong_definition

ALIKE = 0.5  # with less in common, a list of the lines that differ would be longer than the code


def solution_of(bug: Bug) -> str:
    """Return the mistake in a sentence, the lines that differ where they are few, and the lesson's code."""
    source, right = lessons_definition(bug)
    wrong = wrong_definition(bug)
    mistake = textwrap.fill(f"The mistake: {bug.mistake}", 108, initial_indent="# ", subsequent_indent="# ")
    parts = [mistake]
    if lines := list(_changed(wrong, right)):
        parts.append("\n".join(["# What to change (- wrong, + right):", *(f"#   {line}" for line in lines)]))
    code = _methods(source, wrong, right) if isinstance(right, ast.ClassDef) else source
    return "\n#\n".join(parts) + "\n# The lesson's own code:\n\n" + code


def _changed(wrong: Definition, right: Definition) -> Iterator[str]:
    """Return the lines of the wrong and of the right code that differ, if the two are alike, else none."""
    before, after = _lines(wrong), _lines(right)
    if difflib.SequenceMatcher(None, before, after, autojunk=False).ratio() < ALIKE:
        return
    for line in difflib.unified_diff(before, after, n=1, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield line.rstrip()


def _lines(definition: Definition) -> list[str]:
    copy = ast.parse(ast.unparse(definition)).body[0]
    assert isinstance(copy, Definition)
    if ast.get_docstring(copy) is not None:
        del copy.body[0]
    return ast.unparse(copy).splitlines()


def _methods(source: str, wrong: Definition, right: ast.ClassDef) -> str:
    """Return the lesson's class with only those methods that the wrong class has, too, if there are any."""
    names = {node.name for node in wrong.body if isinstance(node, ast.FunctionDef)}
    shared = [n for n in ast.parse(source).body[0].body if getattr(n, "name", None) in names]
    if not shared:
        return source
    lines = source.splitlines()
    blocks = ["\n".join(lines[n.lineno - 1 - len(n.decorator_list) : n.end_lineno]) for n in shared]
    return "\n\n".join([f"class {right.name}:  # other methods are left out", *blocks]) + "\n"
