"""Generate the file of an exercise from its lesson: signatures and docstrings, without the bodies.

The file is made when the learner begins (workspace.py), and the solution is the lesson's source. So there is
no second copy of a lesson that could become outdated.
"""

import ast
import textwrap
from pathlib import Path

from exercises.catalog import Exercise, name_of
from exercises.find_the_bug import Bug, solution_of
from exercises.lesson_source import (
    LINE_LENGTH,
    Helper,
    definition,
    helpers,
    imported,
    imports,
    lines_of,
    part_of,
)

FOLDER = Path(__file__).resolve().parent
SPAN = "span(name, kind)\n    Optional: `with span(...)` marks the block in the pictures of a trace."


def generated(exercise: Exercise) -> str:
    """Return the text of the exercise's file before the learner has written anything."""
    if isinstance(exercise, Bug):
        return exercise.own_file()
    if exercise.stub:
        stub = textwrap.dedent(exercise.stub).strip()
        return f'"""{_introduction(exercise, imported(stub), [])}"""\n\n{stub}\n'
    functions = [definition(exercise, target) for target in exercise.targets]
    parts = [part for f in functions for part in (f.args, f.returns, *f.body) if part is not None]
    needed = imports(exercise, parts, own=map(name_of, exercise.targets))
    introduction = _introduction(exercise, helpers(exercise, functions), [SPAN] * ("import span" in needed))
    head = f'"""{introduction}"""' + (f"\n\n{needed}" if needed else "")
    return "\n\n\n".join([head, *(_stub(exercise, target) for target in exercise.targets)]) + "\n"


def solution(exercise: Exercise) -> str:
    """Return the lesson's own source of the functions."""
    if isinstance(exercise, Bug):
        return solution_of(exercise)
    parts = [part_of(exercise, target) for target in exercise.targets]
    return "\n\n\n".join(lines_of(exercise.lesson, p.lineno, p.end_lineno) for p in parts) + "\n"


def missing(exercise: Exercise, target: str | None = None) -> str:
    """Return the sentence that a function without a body raises; by default the exercise's first one."""
    name = exercise.qualified(target or exercise.target)
    return f"`{name}` is not written yet."


def _introduction(exercise: Exercise, found: list[Helper], optional: list[str]) -> str:
    *names, last = [f"`{exercise.qualified(target)}`" for target in exercise.targets]
    what = f"{', '.join(names)} and {last}" if names else last
    lesson = exercise.lesson.relative_to(FOLDER.parent)
    parts = [
        _wrapped(f"{exercise.title}. Write {what} of {lesson}."),
        _wrapped(
            f"Read notebooks/{exercise.notebook}.ipynb first. Do not open {lesson} yet: it has the solution."
        ),
    ]
    if exercise.stub:
        text = "This is an open exercise: the checker looks only at what your code does, and not at how."
        parts.append(_wrapped(text))
    if used := [*(helper.shown for helper in found), *exercise.helps, *optional]:
        parts.append("You may use:\n\n" + textwrap.indent("\n".join(used), "    "))
    parts.append(f"Check it with `python -m exercises check {exercise.name}`.\n")
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE_LENGTH - 2, break_on_hyphens=False, break_long_words=False)


def _stub(exercise: Exercise, target: str) -> str:
    """Return the signature, the docstring and a body that only raises."""
    function = definition(exercise, target)
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    doc = exercise.doc if target == exercise.target else exercise.docs.get(function.name)
    keeps_docstring = has_docstring and doc is None
    end = first.end_lineno if keeps_docstring else first.lineno - 1
    lines = _signature_on_one_line(lines_of(exercise.lesson, function.lineno, end).splitlines())
    while not has_docstring and lines[-1].lstrip().startswith("#"):  # a comment on the body
        lines.pop()
    if doc is not None:
        lines += textwrap.indent(_docstring(doc), "    ").splitlines()
    text = missing(exercise, target)
    return "\n".join([*lines, f'    raise NotImplementedError("{text}")'])


def _signature_on_one_line(lines: list[str]) -> list[str]:
    """Join a signature that fits into one line without the class's indentation, as ruff would."""
    end = next(
        number for number, line in enumerate(lines) if line.startswith((")", "def")) and line[-1] == ":"
    )
    joined = "".join(line.strip() for line in lines[: end + 1])
    if end == 0 or ",)" in joined or len(joined) > LINE_LENGTH:
        return lines
    return [joined, *lines[end + 1 :]]


def _docstring(text: str) -> str:
    text = textwrap.dedent(text).strip()
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
