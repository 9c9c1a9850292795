"""Find the helpers that the lesson's own code uses, so that a learner need not open the lesson to learn them.

Functions, classes and short constants are found by name in the lesson's source, attributes and methods by the
class of their object: an annotation says it of a parameter, an assignment of an attribute, and the exercise's
`objects` of the others. A helper is shown by its signature and the first sentence of its docstring, or the
comment beside an attribute. Nothing is imported, so this also works without torch.
"""

import ast
import copy
import re
import textwrap
from collections.abc import Iterator

from exercises.catalog import Exercise
from exercises.lesson_source import (
    Definition,
    assigned_value,
    class_named,
    file_of,
    find,
    imported_as_module,
    imported_modules,
    in_module,
    member_of,
)

WIDTH = 102
_MAX_CONSTANT = 80
_DEFAULT = re.compile(r"(?<=[\w\]])=(?=[\w'\"(\[-])")  # ast.unparse writes `x: int=0`
_NO_VALUE = re.compile(r" = field\(.*")
_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)", re.S)


def helpers(exercise: Exercise, functions: list[ast.FunctionDef]) -> list[str]:
    """Return a line or more for each helper that the functions of an exercise use, attributes last."""
    targets = {target.rpartition(".")[2] for target in exercise.targets}
    found = {text for text in _names(exercise, functions, targets) if text}
    found |= {text for text in _attributes(exercise, functions, targets) if text}
    known = {text.partition(".")[2] for text in found}  # members that are listed under the name of a variable
    found |= {text for text in _of_results(exercise, functions, found) if text.partition(".")[2] not in known}
    plain = {text for text in found if "(" not in text and "\n" not in text and "=" not in text}
    short = textwrap.wrap(", ".join(sorted(plain, key=str.lower)), WIDTH, break_on_hyphens=False)
    return [*sorted(found - plain, key=str.lower), *short]


def described(name: str, found: Definition, owner: Definition | None = None) -> str:
    """Return the signature of a definition under that name, and the first sentence of its docstring.

    `owner` is the class whose attribute it is.
    """
    node = found.node
    if isinstance(node, ast.FunctionDef):
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        returns = ast.unparse(node.returns) if node.returns else "None"
        is_value = decorators & {"property", "cached_property"}
        arguments = _arguments(node, len(name), is_method=owner is not None)
        signature = f"{name}: {returns}" if is_value else f"{name}{arguments} -> {returns}"
    elif isinstance(node, ast.ClassDef):
        signature = name + _fields(node)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and owner:
        return _value(name, Definition(found.module, node), owner)
    else:
        is_one_of_several = isinstance(node, ast.Assign) and isinstance(node.targets[-1], ast.Tuple)
        value = assigned_value(node, name) if is_one_of_several else None
        text = f"{name} = {ast.unparse(value)}" if value else ast.unparse(node)
        return text if len(text) <= _MAX_CONSTANT else ""
    doc = ast.get_docstring(node) or ""
    sentence = _SENTENCE.match(doc)
    return _wrapped(signature, " ".join(sentence[1].split()) if sentence else "")


def _names(exercise: Exercise, functions: list[ast.FunctionDef], targets: set[str]) -> Iterator[str]:
    """Describe the functions, classes and constants of lessons that the functions use by name."""
    called = {
        name.id
        for function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for name in [call.func]
        if isinstance(name, ast.Name)
    }
    used = {n.id for function in functions for n in ast.walk(function) if isinstance(n, ast.Name)}
    for name in used - targets:
        try:
            found = in_module(exercise.module, name)
        except LookupError:
            continue
        is_only_a_type = isinstance(found.node, ast.ClassDef) and name not in called
        if not is_only_a_type or _has_fields(found.node):
            yield described(name, found)


def _attributes(exercise: Exercise, functions: list[ast.FunctionDef], targets: set[str]) -> Iterator[str]:
    """Describe the attributes and methods that the functions use of objects whose class is known."""
    for function, target in zip(functions, exercise.targets, strict=True):
        classes = _classes(exercise, function, target)
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or node.attr in targets:
                continue
            owner = ast.unparse(node.value)
            module = imported_as_module(exercise.module, owner)
            if module:
                yield described(f"{owner}.{node.attr}", in_module(module, node.attr))
                continue
            known = classes.get(owner) or _class_of_attribute(classes, owner)
            found = member_of(known, node.attr) if known else None
            if found is not None:
                yield described(f"{owner}.{node.attr}", found, known)


def _of_results(exercise: Exercise, functions: list[ast.FunctionDef], found: set[str]) -> Iterator[str]:
    """Describe the methods that the functions call on what the helpers return, such as `transfer.wait()`."""
    called = {n.attr for function in functions for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    for name in {word for text in found for word in _returned(text)}:
        for module in imported_modules(exercise.module):
            if (returned := class_named(module, ast.Name(name))) is None:
                continue
            for attribute in called:
                member = member_of(returned, attribute)
                if member and (isinstance(member.node, ast.FunctionDef) or not _has_fields(returned.node)):
                    decorators = {ast.unparse(one) for one in getattr(member.node, "decorator_list", [])}
                    is_of_class = decorators & {"classmethod", "staticmethod"}
                    shown = name if is_of_class else _snake(name)
                    yield described(f"{shown}.{attribute}", member, returned)


def _returned(text: str) -> set[str]:
    """Return the names in what a described helper returns, and its own name if it is a class."""
    signature = text.partition("\n    ")[0]
    returned = set(re.findall(r"\w+", signature.partition(" -> ")[2]))
    return returned if " -> " in signature else {signature.partition("(")[0]}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")


def _class_of_attribute(classes: dict[str, Definition], expression: str) -> Definition | None:
    """Return the class of self.x: its annotation says it, or the constructor that makes it."""
    before, _, name = expression.rpartition(".")
    found = member_of(classes[before], name) if before in classes else None
    if found is None or not isinstance(found.node, ast.Assign | ast.AnnAssign):
        return None
    is_annotated = isinstance(found.node, ast.AnnAssign)
    kind = found.node.annotation if is_annotated else assigned_value(found.node, f"self.{name}")
    kind = kind.func if isinstance(kind, ast.Call) else kind
    return class_named(found.module, kind)


def _classes(exercise: Exercise, function: ast.FunctionDef, target: str) -> dict[str, Definition]:
    """Return the classes of the objects whose attributes the function uses, by the objects' names."""
    classes = {owner: find(dotted) for owner, dotted in exercise.objects.items()}
    in_class = exercise.qualified(target).rpartition(".")[0]
    if in_class:
        classes["self"] = find(f"{exercise.module}.{in_class}")
    for argument in function.args.args:
        if found := class_named(exercise.module, argument.annotation):
            classes.setdefault(argument.arg, found)
    return classes


def _arguments(node: ast.FunctionDef, before: int, is_method: bool = False) -> str:
    """Return the parameters with their types, or without them if the line would be too long.

    Those of a method that have a default are left out: no exercise needs them.
    """
    arguments = copy.deepcopy(node.args)
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    if is_method and arguments.defaults:
        del arguments.args[-len(arguments.defaults) :]
        arguments.defaults = []
    text = f"({_DEFAULT.sub(' = ', ast.unparse(arguments))})"
    if before + len(text) > WIDTH - 10:
        for argument in [*arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None
        text = f"({ast.unparse(arguments)})"
    return text


def _fields(node: ast.ClassDef) -> str:
    """Return what a class is called with: the fields of a dataclass or tuple, or the parameters."""
    if fields := [child for child in node.body if isinstance(child, ast.AnnAssign)]:
        texts = [_NO_VALUE.sub("", ast.unparse(field)) for field in fields]
        return f"({', '.join(texts)})"
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _arguments(child, len(node.name))
    return ""


def _has_fields(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(isinstance(child, ast.AnnAssign) for child in node.body)


def _value(name: str, found: Definition, owner: Definition) -> str:
    """Return an attribute with its type, if the lesson says it, and the comment beside it."""
    node = found.node
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else _kind_of(owner, node, name)
    line = file_of(found.module).read_text().splitlines()[node.lineno - 1]
    comment = line.partition("  # ")[2]
    sentence = comment[:1].upper() + comment[1:] + "." if comment and "noqa" not in comment else ""
    return _wrapped(f"{name}: {kind}" if kind else name, sentence)


def _kind_of(owner: Definition, node: ast.Assign, name: str) -> str:
    """Return the class that makes the attribute, or the type of the parameter that it keeps, or nothing."""
    value = assigned_value(node, f"self.{name.rpartition('.')[2]}")
    if isinstance(value, ast.Call) and ast.unparse(value.func).lstrip("_")[:1].isupper():
        return ast.unparse(value.func)
    for child in ast.walk(owner.node):
        if isinstance(child, ast.arg) and child.annotation and child.arg == getattr(value, "id", None):
            return ast.unparse(child.annotation)
    return ""


def _wrapped(signature: str, sentence: str) -> str:
    lines = textwrap.wrap(signature, WIDTH, subsequent_indent="        ", break_long_words=False)
    lines += textwrap.wrap(sentence, WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
