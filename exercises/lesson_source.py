"""Read the lessons' source: a function, the imports that it needs, and the helpers that it uses.

A helper is found by its name in the lesson's source, and shown by its signature and the first sentence of
its docstring. What a solution uses of an object, such as `wire.rank`, stands in the function's docstring or
in the exercise's `helps`. Nothing is imported, so this also works without torch.
"""

import ast
import builtins
import copy
import functools
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from exercises.catalog import ROOT, Exercise
from exercises.catalog.exercise import LESSON_PACKAGES, name_of

WIDTH = 102
LINE_LENGTH = 110
_MAX_CONSTANT = 80
_NO_IDEA = {"span"}  # it notes a time for the trace, so a solution may leave it out
_DEFAULT = re.compile(r"(?<=[\w\]])=(?=[\w'\"(\[-])")  # ast.unparse writes `x: int=0`
_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)", re.S)


@functools.cache
def tree_of(lesson: Path) -> ast.Module:
    """Return the tree of a lesson's file; it must not be changed."""
    return ast.parse(lesson.read_text(encoding="utf-8"))


def definition(exercise: Exercise, target: str) -> ast.FunctionDef:
    """Return the lesson's definition of one of the exercise's functions; it must not be changed."""
    if not isinstance(place := part_of(exercise, target), ast.FunctionDef):
        raise LookupError(f"{exercise.name}: {target} is not a function.")
    return place


def part_of(exercise: Exercise, target: str) -> ast.Module | ast.ClassDef | ast.FunctionDef:
    """Return the lesson's definition of a function or class; it must not be changed."""
    place: ast.Module | ast.ClassDef | ast.FunctionDef = tree_of(exercise.lesson)
    for part in exercise.qualified(target).split("."):
        found = [n for n in place.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
        if not found:
            raise LookupError(f"{exercise.name}: {exercise.module} has no {part}.")
        place = found[-1]
    return place


def lines_of(lesson: Path, first: int, last: int | None) -> str:
    """Return the lines `first` to `last` of a lesson's file, counted from 1, without their indentation."""
    return textwrap.dedent("\n".join(lesson.read_text(encoding="utf-8").splitlines()[first - 1 : last]))


def without_comments(code: str) -> str:
    """Return a function's code without comments and empty lines."""
    lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "\n".join(line for line in lines if line.strip())


class Helper(NamedTuple):
    """A name that a solution uses, the module that defines it, and how it is shown to the learner."""

    name: str
    module: str
    shown: str


def helpers(exercise: Exercise, functions: list[ast.FunctionDef]) -> list[Helper]:
    """Return what the bodies of an exercise's functions use of the lessons by name, in alphabetical order."""
    nodes = [node for function in functions for part in function.body for node in ast.walk(part)]
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    used = {
        node.id for node in nodes if isinstance(node, ast.Name) and (node.id in called or node.id.isupper())
    }
    found = []
    for name in sorted(used - {name_of(target) for target in exercise.targets} - _NO_IDEA, key=str.lower):
        definition = find(exercise.module, name)
        if definition is not None and (text := described(name, definition[1])):
            found.append(Helper(name, definition[0], text))
    return found


def imported(stub: str) -> list[Helper]:
    """Return what an open exercise imports from the lessons."""
    found = []
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LESSON_PACKAGES:
            for alias in node.names:
                if (part := find(node.module or "", alias.name)) is not None:
                    found.append(Helper(alias.name, part[0], described(alias.name, part[1])))
    return found


def find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return the module and the definition that a name in a lesson's module stands for, through imports."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for node in tree_of(file).body if file.is_file() else []:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and name in {ast.unparse(target) for target in node.targets}:
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LESSON_PACKAGES:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module or "", alias.name)
    return None


def described(name: str, node: ast.AST) -> str:
    """Return the signature of a function or class and its first sentence, or a short constant."""
    if isinstance(node, ast.FunctionDef):
        returns = ast.unparse(node.returns) if node.returns else "None"
        signature = f"{name}{_arguments(node, len(name))} -> {returns}"
    elif isinstance(node, ast.ClassDef):
        signature = name + _fields(node)
    else:
        text = ast.unparse(node)
        return text if len(text) <= _MAX_CONSTANT else ""
    sentence = _SENTENCE.match(ast.get_docstring(node) or "")
    lines = textwrap.wrap(signature, WIDTH, subsequent_indent="        ", break_long_words=False)
    text = " ".join(sentence[1].split()) if sentence else ""
    return "\n".join(lines + textwrap.wrap(text, WIDTH - 4, initial_indent="    ", subsequent_indent="    "))


def _arguments(node: ast.FunctionDef, before: int) -> str:
    """Return the parameters with their types, or without them if the line would be too long."""
    text = f"({_DEFAULT.sub(' = ', ast.unparse(node.args))})"
    if before + len(text) > WIDTH - 10:
        text = f"({ast.unparse(without_annotations(node.args))})"
    return text.replace("(self, ", "(").replace("(self)", "()")


def without_annotations(arguments: ast.arguments) -> ast.arguments:
    """Return a copy of a function's parameters, without their types."""
    untyped = copy.deepcopy(arguments)
    for node in ast.walk(untyped):
        if isinstance(node, ast.arg):
            node.annotation = None
    return untyped


def _fields(node: ast.ClassDef) -> str:
    """Return what a class is called with: the fields of a dataclass or tuple, or the parameters."""
    if fields := [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]:
        return f"({', '.join(field.partition(' = field(')[0] for field in fields)})"
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _arguments(child, len(node.name))
    return "(text)" if any("Error" in ast.unparse(base) for base in node.bases) else "()"


def imports(exercise: Exercise, nodes: Iterable[ast.AST], own: Iterable[str]) -> str:
    """Return the imports that parts of a lesson need, without those of `own` names."""
    tree = tree_of(exercise.lesson)
    parts = (node for part in nodes for node in ast.walk(part))
    used = {node.id for node in parts if isinstance(node, ast.Name)} - set(own)
    plain: set[str] = set()
    chosen: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            needed = [one for one in node.names if (one.asname or one.name.partition(".")[0]) in used]
            if module is None:
                plain |= {f"import {_written(alias)}" for alias in needed}
            elif needed:
                chosen.setdefault(module, []).extend(map(_written, needed))
    if defined := used & _defined(tree):
        chosen[exercise.module] = [*defined]
    lines = sorted(plain) + [_from(module, sorted(names)) for module, names in sorted(chosen.items())]
    return "\n".join(sorted(lines, key=_is_ours_or_a_librarys))


def _is_ours_or_a_librarys(line: str) -> tuple[bool, bool]:
    """Order imports: Python's own first, then libraries, then the lessons."""
    package = line.split()[1].partition(".")[0]
    return package in LESSON_PACKAGES, package not in sys.stdlib_module_names


def _written(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that the lesson's own file defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names - set(dir(builtins))


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
