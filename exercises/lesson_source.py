"""Find definitions in the source of the lessons, through imports and base classes, without an import."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from exercises.catalog import ROOT
from exercises.catalog.exercise import LESSON_PACKAGES


class Definition(NamedTuple):
    """A definition of a lesson's file, and the name of its module."""

    module: str
    node: ast.AST


def find(dotted: str) -> Definition:
    """Return what a dotted name of a lesson stands for, through the imports of other modules."""
    parts = dotted.split(".")
    cut = max(n for n in range(1, len(parts)) if ROOT.joinpath(*parts[:n]).with_suffix(".py").is_file())
    module, names = ".".join(parts[:cut]), parts[cut:]
    found = in_module(module, names[0])
    for name in names[1:]:
        if not isinstance(found.node, ast.ClassDef):
            raise LookupError(f"{dotted} is not in a class.")
        member = member_of(found, name)
        if member is None:
            raise LookupError(f"{dotted} does not exist.")
        found = member
    return found


def in_module(module: str, name: str) -> Definition:
    """Return what a module defines or imports under a name."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(module, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom) and node.module and is_lesson(node.module):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return in_module(node.module, alias.name)
    raise LookupError(f"{module} does not define {name}.")


@functools.cache
def member_of(found: Definition, name: str) -> Definition | None:
    """Return a method, a field or an attribute that a method assigns, also one of a base class."""
    node = found.node
    assert isinstance(node, ast.ClassDef)
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == name:
            return Definition(found.module, child)
        if isinstance(child, ast.AnnAssign) and name in _assigned(child):
            return Definition(found.module, child)
    for child in ast.walk(node):
        if isinstance(child, ast.Assign | ast.AnnAssign) and f"self.{name}" in _assigned(child):
            return Definition(found.module, child)
    for base in node.bases:
        try:
            parent = in_module(found.module, ast.unparse(base).partition("[")[0])
        except LookupError:
            continue
        if isinstance(parent.node, ast.ClassDef) and (member := member_of(parent, name)):
            return member
    return None


def class_named(module: str, expression: ast.expr | None) -> Definition | None:
    """Return the class of a lesson that a name in a module stands for, or None."""
    if not isinstance(expression, ast.Name):
        return None
    try:
        found = in_module(module, expression.id)
    except LookupError:
        return None
    if isinstance(found.node, ast.Assign) and isinstance(found.node.value, ast.BinOp):  # X = A | B
        return class_named(found.module, found.node.value.left)
    if isinstance(found.node, ast.Assign) and isinstance(found.node.value, ast.Attribute):  # X = module.X
        module = imported_as_module(found.module, ast.unparse(found.node.value.value)) or ""
        return class_named(module, ast.Name(found.node.value.attr))
    return found if isinstance(found.node, ast.ClassDef) else None


def imported_as_module(module: str, name: str) -> str | None:
    """Return the lesson's module that a module imports under that name: collectives of comm."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and is_lesson(node.module):
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if (alias.asname or alias.name) == name and file_of(dotted).is_file():
                    return dotted
    return None


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


@functools.cache
def _tree(module: str) -> ast.Module:
    file = file_of(module)
    return ast.parse(file.read_text() if file.is_file() else "")


def is_lesson(module: str) -> bool:
    return module.partition(".")[0] in LESSON_PACKAGES


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return {ast.unparse(part) for part in parts}


@functools.cache
def imported_modules(module: str) -> set[str]:
    """Return the modules of lessons from which a module imports, and the module itself."""
    imports = (node for node in _tree(module).body if isinstance(node, ast.ImportFrom))
    return {module, *(node.module for node in imports if node.module and is_lesson(node.module))}


def assigned_value(node: ast.Assign | ast.AnnAssign, target: str) -> ast.expr | None:
    """Return what an assignment gives to one of its targets, such as self.b in self.a, self.b = 1, 2."""
    [*_, first] = node.targets if isinstance(node, ast.Assign) else [node.target]
    if isinstance(first, ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = zip(first.elts, node.value.elts, strict=False)
        return next((value for part, value in pairs if ast.unparse(part) == target), None)
    return node.value
