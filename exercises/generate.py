"""Generate the file of each exercise from its lesson: signatures and docstrings, without the bodies.

    python -m exercises.generate            write all files
    python -m exercises.generate --check    list the files that differ, and exit with 1 if there are any

The solution of an exercise is the lesson's source, so a second copy of the lesson cannot become outdated.
"""

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from exercises.catalog import EXERCISES, Exercise, name_of
from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.find_the_bug import Bug, solution_of
from exercises.helpers import helpers

FOLDER = Path(__file__).resolve().parent
LINE_LENGTH = 110


def generated(exercise: Exercise) -> str:
    """Return the text of the exercise's file before the learner has written anything."""
    if isinstance(exercise, Bug):
        return exercise.own_file()
    source = exercise.lesson.read_text()
    tree = ast.parse(source)
    definitions = [definition(tree, exercise, target) for target in exercise.targets]
    imports = "\n".join(_imports(tree, definitions, exercise))
    stubs = [
        _stub(source, function, exercise, target)
        for function, target in zip(definitions, exercise.targets, strict=True)
    ]
    head = f'"""{_introduction(exercise, definitions)}"""' + (f"\n\n{imports}" if imports else "")
    return "\n\n\n".join([head, *stubs]) + "\n"


def solution(exercise: Exercise) -> str:
    """Return the lesson's own source of the functions."""
    if isinstance(exercise, Bug):
        return solution_of(exercise)
    source = exercise.lesson.read_text()
    tree = ast.parse(source)
    segments = [_segment(source, definition(tree, exercise, target)) for target in exercise.targets]
    return "\n\n\n".join(segments) + "\n"


def missing(exercise: Exercise, target: str | None = None) -> str:
    """Return the sentence that a function without a body raises; by default the exercise's first one."""
    name = exercise.qualified(target or exercise.target)
    return f"`{name}` is not written yet."


def definition(tree: ast.Module, exercise: Exercise, target: str) -> ast.FunctionDef:
    """Return the definition of one of the exercise's functions in the lesson's tree."""
    place: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for part in exercise.qualified(target).split("."):
        found = [n for n in place.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
        if not found:
            raise LookupError(f"{exercise.name}: {exercise.module} has no {part}.")
        place = found[-1]
    if not isinstance(place, ast.FunctionDef):
        raise LookupError(f"{exercise.name}: {target} is not a function.")
    return place


def _introduction(exercise: Exercise, functions: list[ast.FunctionDef]) -> str:
    *names, last = [f"`{exercise.qualified(target)}`" for target in exercise.targets]
    what = f"{', '.join(names)} and {last}" if names else last
    lesson = exercise.lesson.relative_to(FOLDER.parent)
    parts = [
        _wrapped(f"{exercise.title}. Write {what} of {lesson}."),
        _wrapped(
            f"Read notebooks/{exercise.notebook}.ipynb first. Do not open {lesson} yet: it has the solution."
        ),
    ]
    if used := [*(helper.shown for helper in helpers(exercise, functions)), *exercise.helps]:
        parts.append("You may use:\n\n" + textwrap.indent("\n".join(used), "    "))
    parts.append(f"Check it with `python -m exercises check {exercise.name}`.\n")
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE_LENGTH - 2, break_on_hyphens=False, break_long_words=False)


def _segment(source: str, node: ast.FunctionDef) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def _stub(source: str, function: ast.FunctionDef, exercise: Exercise, target: str) -> str:
    """Return the signature, the docstring and a body that only raises."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    doc = exercise.doc if target == exercise.target else exercise.docs.get(function.name)
    keeps_docstring = has_docstring and doc is None
    end = first.end_lineno if keeps_docstring else first.lineno - 1
    lines = textwrap.dedent("\n".join(source.splitlines()[function.lineno - 1 : end])).splitlines()
    lines = _signature_on_one_line(lines)
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


def _imports(tree: ast.Module, functions: list[ast.FunctionDef], exercise: Exercise) -> Iterator[str]:
    """Return the imports that the signatures and the lesson's bodies need, sorted as ruff sorts them."""
    parts = [part for f in functions for part in (f.args, f.returns, *f.body) if part is not None]
    nodes = (node for part in parts for node in ast.walk(part))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used -= {name_of(target) for target in exercise.targets}
    plain: dict[str, str] = {}
    chosen: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) in used:
                    plain[alias.name] = f"import {_written(alias)}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) in used:
                    chosen.setdefault(node.module, []).append(_written(alias))
    own = sorted(used & _defined(tree), key=_isort_key)
    if own:
        chosen[exercise.module] = own
    sections: list[list[str]] = [[], [], []]
    for module, line in sorted(plain.items()):
        sections[_section(module)].append(line)
    for module, names in sorted(chosen.items()):
        sections[_section(module)].append(_from(module, names))
    yield "\n\n".join("\n".join(section) for section in sections if section)


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


def _isort_key(name: str) -> tuple[int, str]:
    """Order names as ruff does: constants, then classes, then all others."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name.lower()


def _section(module: str) -> int:
    package = module.partition(".")[0]
    return 0 if package in sys.stdlib_module_names else 2 if package in LESSON_PACKAGES else 1


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def main() -> int:
    if unknown := set(sys.argv[1:]) - {"--check"}:
        print(f"The only option is --check, not {' '.join(sorted(unknown))}.", file=sys.stderr)
        return 2
    different = [e for e in EXERCISES if _text(FOLDER / e.file) != generated(e)]
    if "--check" in sys.argv[1:]:
        for exercise in different:
            print(f"exercises/{exercise.file} differs from what its lesson gives.")
        return 1 if different else 0
    for exercise in different:
        (FOLDER / exercise.file).parent.mkdir(exist_ok=True)
        (FOLDER / exercise.file).write_text(generated(exercise))
        print(f"exercises/{exercise.file} is written.")
    return 0


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
