"""List the functions and classes of the lessons that a solution uses, with their signatures.

A helper is found by its name in the lesson's source, and shown by its signature and the first sentence of
its docstring. What a solution uses of an object, such as `wire.rank`, stands in the function's docstring or
in the exercise's `helps`. Nothing is imported, so this also works without torch.
"""

import ast
import re
import textwrap
from typing import NamedTuple

from exercises.catalog import ROOT, Exercise
from exercises.catalog.exercise import LESSON_PACKAGES, name_of

WIDTH = 102
_MAX_CONSTANT = 80
_NO_IDEA = {"span"}  # it notes a time for the trace, so a solution may leave it out
_DEFAULT = re.compile(r"(?<=[\w\]])=(?=[\w'\"(\[-])")  # ast.unparse writes `x: int=0`
_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)", re.S)


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


def find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return the module and the definition that a name in a lesson's module stands for, through imports."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.parse(file.read_text()).body if file.is_file() else []:
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
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    text = f"({_DEFAULT.sub(' = ', ast.unparse(node.args))})"
    if before + len(text) > WIDTH - 10:
        for argument in arguments:
            argument.annotation = None
        text = f"({ast.unparse(node.args)})"
    return text.replace("(self, ", "(").replace("(self)", "()")


def _fields(node: ast.ClassDef) -> str:
    """Return what a class is called with: the fields of a dataclass or tuple, or the parameters."""
    if fields := [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]:
        return f"({', '.join(field.partition(' = field(')[0] for field in fields)})"
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _arguments(child, len(node.name))
    return ""
