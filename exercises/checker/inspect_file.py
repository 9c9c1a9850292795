"""Inspect a learner's file without running it: is it Python, is the function there, is it written?"""

import ast
import os
from importlib.util import decode_source
from pathlib import Path

from exercises.catalog import Exercise, name_of
from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.find_the_bug import Bug, problem_of_bug
from exercises.generate import generated, missing
from exercises.lesson_source import definition, without_annotations
from exercises.names import typed

OURS = LESSON_PACKAGES | {"exercises", "tests", "benchmarks"}
INTERFACE = {"comm.collectives", "comm.functions", "comm.point_to_point", "lab.ranks", "lab.trace"}


def problem_of(exercise: Exercise, file: Path) -> tuple[str, str] | None:
    """Return a state and a sentence if the tests need not run, else None."""
    try:
        tree = ast.parse(source_of(file))
    except FileNotFoundError:
        begin = f"`{typed(f'watch {exercise.name}')}`"
        return "unsolved", f"There is no file {shown(file)}; {begin} makes it."
    except OSError as error:
        return "invalid", f"{shown(file)} cannot be read: {error}."
    except UnicodeError:
        return "invalid", f"{shown(file)} is not saved as UTF-8: choose this encoding in your editor."
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        return "invalid", f"{shown(file)}{line} is not Python: {text}."
    stub = ast.parse(generated(exercise))
    if closed := sorted(_imported(tree, exercise) - _imported(stub, exercise)):
        return "invalid", (
            f"{shown(file)} imports {closed[0]}. It may import what it imported at first, and "
            f"from the workbook also {', '.join(sorted(INTERFACE - {exercise.module}))}."
        )
    if isinstance(exercise, Bug):
        return problem_of_bug(exercise, tree, shown(file))
    kinds = (ast.FunctionDef, ast.ClassDef) if exercise.stub else ast.FunctionDef
    written = {n.name: n for n in tree.body if isinstance(n, kinds)}
    stubs = {n.name: n for n in stub.body if isinstance(n, kinds)}
    for target in exercise.targets:
        name = name_of(target)
        if name not in written:
            return "invalid", f"{shown(file)} has no {'class or ' * bool(exercise.stub)}function `{name}`."
        if _body(written[name]) == _body(stubs[name]):
            return "unsolved", missing(exercise, target)
        if exercise.stub:
            continue
        expected = definition(exercise, target)
        if _parameters(written[name]) != _parameters(expected):
            wanted, got = _signature(expected), _signature(written[name])
            return "invalid", f"The signature must be {wanted}, but {shown(file)} has {got}."
    return None


def source_of(file: Path) -> str:
    """Return a learner's code as Python reads it: with any line ends, and with a byte order mark or without.

    Raise UnicodeError if it is not in UTF-8, nor in an encoding that it declares.
    """
    code = file.read_bytes()
    try:
        if b"\0" not in code:  # as UTF-16 has
            return decode_source(code)
    except SyntaxError:  # Python's word for it, where the first lines are not in UTF-8
        pass
    raise UnicodeError


def _imported(tree: ast.Module, exercise: Exercise) -> set[str]:
    """Return what a file imports of the workbook, without the interface that is open to this exercise."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name if one.asname else one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names}
    free = INTERFACE - {exercise.module}
    ours = {name for name in found if name.partition(".")[0] in OURS}
    return {name for name in ours if not free & {name, name.rpartition(".")[0]}}


def shown(file: Path) -> str:
    """Return a file's path as the reader would type it."""
    path = os.path.relpath(file)
    return str(file) if path.startswith("..") else path


def _body(function: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the statements without the docstring."""
    skipped = 1 if ast.get_docstring(function) is not None else 0
    return [ast.dump(statement) for statement in function.body[skipped:]]


def _parameters(function: ast.FunctionDef) -> str:
    """Return the parameters with their defaults; annotations do not matter."""
    return ast.dump(without_annotations(function.args))


def _signature(function: ast.FunctionDef) -> str:
    return f"`{function.name}({ast.unparse(without_annotations(function.args))})`"
