"""Make an exercise of each mutant: a file with the mistake, which the learner finds and mends.

      mutants/data_parallel.py   def gradient_summed(self)        named, explained, and killed by a test
      bugs/bug_naive_787.py      def finish_gradient_sync(self)   the lesson's name and docstring, no hint

The exercise has a name that gives nothing away, and keeps it when mutants are added. It is graded by the test
that kills the mutant and by those that kill other mutants of the same function, so that one mistake cannot be
exchanged for another. Mutants are read here, and not imported.
"""

import ast
import copy
import difflib
import functools
import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exercises import mutants
from exercises.catalog import EXERCISES, ROOT, Exercise

Definition = ast.FunctionDef | ast.ClassDef
MAX_TESTS = 4
MOST_LINES = (4, 9, 15, 22)  # to read and to write, for the difficulties 1 to 4
MINUTES = (10, 15, 20, 25, 30)
ALIKE = 0.5  # with less in common, a list of the lines that differ would be longer than the code
ORDER = (
    *("comm", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel", "context_parallel"),
    *("expert_parallel", "hybrid_parallel", "training", "lab"),
)
TOOLS = (
    "Tools: the checker says which rank, which value and by how much; lab/ranks shows where ranks hang;\n"
    "--trace FOLDER draws what each rank did when; exercises/README.md lists more."
)
PATTERN = '`pattern` names the algorithm of a collective, such as "ring"; None lets the collective choose.'


@dataclass(frozen=True)
class Bug(Exercise):
    """An exercise whose file has a mistake: `mutant` is its origin, and `symptom` what a user sees.

    `mistake` says what is wrong. Only the solution shows it.
    """

    mutant: str = ""
    symptom: str = ""
    mistake: str = ""

    @property
    def file(self) -> Path:
        return Path("bugs", f"{self.name}.py")

    def own_file(self) -> str:
        """Return the learner's file: the lesson's name and docstring, and the wrong implementation."""
        place = f"`{self.qualified_name}` of {self.lesson.relative_to(ROOT)}"
        text = f"Find the bug. {self.symptom} The mistake is in {place}."
        check = f"Mend it below, and check it with `python -m exercises check {self.name}`."
        code = _wrong_code(self)
        lines = [textwrap.fill(text, 108), "", check, TOOLS, *([PATTERN] if "pattern=" in code else [])]
        return '"""' + "\n".join(lines) + '\n"""\n\n' + code + "\n"


@functools.cache
def bugs() -> tuple[Bug, ...]:
    """Return all exercises of this kind, in the order of the lessons, and in each the easiest first."""
    made = [_bug(mutant) for mutant in described().values()]
    place = {lesson: number for number, lesson in enumerate(ORDER)}
    return tuple(sorted(made, key=lambda b: (place[b.target.partition(".")[0]], b.difficulty, b.name)))


@dataclass(frozen=True)
class Described:
    """A mutant as its file describes it."""

    name: str
    doc: str
    target: str
    killer: str
    cause: tuple[str, ...]
    symptom: str
    code: tuple[ast.stmt, ...]  # the imports and definitions that the mutant needs, and the mutant

    @staticmethod
    def read(node: Definition, file: ast.Module) -> "Described":
        [call] = [each for each in node.decorator_list if _is_mark(each)]
        fields = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        module, _, test = fields["killer"].rpartition(".")
        doc = " ".join((ast.get_docstring(node) or "").split())
        cause = fields.get("cause", ())
        return Described(
            name=node.name,
            doc=doc,
            target=fields["target"],
            killer=f"{module.replace('.', '/')}.py::{test}",  # as pytest names it
            cause=(cause,) if isinstance(cause, str) else cause,
            symptom=fields.get("symptom") or doc.partition(":")[0].rstrip(".") + ".",
            code=tuple(_needed(node, file)),
        )


@functools.cache
def described() -> dict[str, Described]:
    """Return all mutants by name."""
    trees = [ast.parse(path.read_text()) for path in mutants.files()]
    marked = [
        Described.read(node, tree)
        for tree in trees
        for node in tree.body
        if isinstance(node, Definition) and any(map(_is_mark, node.decorator_list))
    ]
    return {mutant.name: mutant for mutant in marked}


def _is_mark(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "mutant"


def _needed(mutant: Definition, file: ast.Module) -> list[ast.stmt]:
    """Return the mutant, the file's definitions that it uses, and what these import, in the file's order."""
    wanted: list[ast.stmt] = [mutant]
    names: set[str] = set()
    for node in wanted:  # which grows
        names |= _free_names(node)
        wanted.extend(each for each in file.body if each not in wanted and _name_of(each) in names)
    return [*_imports(file, names), *(node for node in file.body if node in wanted)]


def _free_names(node: ast.stmt) -> set[str]:
    """Return the names that a definition uses and does not bind itself."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    bound = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    bound |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return {each.id for each in names} - bound - {"mutant"}


def _name_of(node: ast.stmt) -> str | None:
    """Return the name that a statement of a file defines, but not one that it imports."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", None)
    return getattr(node, "name", None)


def _imports(file: ast.Module, names: set[str]) -> Iterator[ast.stmt]:
    for node in file.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in names]
            if bound:
                yield ast.copy_location(type(node)(**{**vars(node), "names": bound}), node)


def _bug(mutant: Described) -> Bug:
    tests = [mutant.killer]
    tests += [other.killer for other in described().values() if other.target == mutant.target]
    tests += [test for exercise in EXERCISES if exercise.target == mutant.target for test in exercise.tests]
    draft = Bug(
        name="draft",
        title=f"The mistake in `{mutant.target.rpartition('.')[2]}`",
        target=mutant.target,
        tests=tuple(dict.fromkeys(tests))[:MAX_TESTS],
        difficulty=1,
        minutes=MINUTES[0],
        hints=("", "", ""),
        mutant=mutant.name,
        symptom=mutant.symptom,
        mistake=mutant.doc,
    )
    right, wrong = lessons_definition(draft)[1], _wrong_definition(draft)
    difficulty = 1 + sum(len(_lines(wrong)) + len(_changes(wrong, right)) > most for most in MOST_LINES)
    lesson = draft.lesson.stem.removeprefix("train_")
    new = {
        "name": f"bug_{lesson}_{hashlib.sha256(mutant.name.encode()).hexdigest()[:3]}",
        "difficulty": difficulty,
        "minutes": MINUTES[difficulty - 1],
        "hints": (
            f"It should be so: {mutant.killer.rpartition('::test_')[2].replace('_', ' ')}.",
            f"What happens: {mutant.doc}",
            _where(wrong, right),
        ),
    }
    return Bug(**(vars(draft) | new))


def _where(wrong: Definition, right: Definition) -> str:
    """Return the third hint: the first line that differs, or after which something is missing."""
    before, after = _lines(right), _lines(wrong)
    for kind, _, _, start, _ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind in ("replace", "insert"):
            return f"Look at this line, and at what follows from it: `{after[start].strip()}`"
        if kind == "delete":
            where, line = ("before", after[0]) if start == 0 else ("after", after[start - 1])
            return f"Something is missing {where} this line: `{line.strip()}`"
    return "The lines are the lesson's. What stands around the function, such as a decorator, is missing."


def lessons_definition(bug: Bug) -> tuple[str, Definition]:
    """Return the lesson's source of the function or class that has the mistake, and its tree."""
    source = bug.lesson.read_text()
    place: ast.Module | Definition = ast.parse(source)
    for part in bug.qualified_name.split("."):
        place = [n for n in place.body if isinstance(n, Definition) and n.name == part][-1]
    assert isinstance(place, Definition)
    lines = source.splitlines()[place.lineno - 1 - len(place.decorator_list) : place.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n", place


def _wrong_tree(bug: Bug) -> ast.Module:
    """Return the mutant's code under the lesson's name, without what it says of itself."""
    tree = copy.deepcopy(ast.Module([*described()[bug.mutant].code], []))
    definitions = [node for node in tree.body if isinstance(node, Definition)]
    helpers = [node.name for node in definitions if node.name != bug.mutant]
    new_names = {bug.mutant: bug.function} | {name: f"_Part{i}" for i, name in enumerate(helpers, start=1)}
    for node in definitions:
        node.name = new_names[node.name]
        node.decorator_list = [each for each in node.decorator_list if not _is_mark(each)]
        if ast.get_docstring(node) is not None:
            del node.body[0]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for alias in [alias for node in imports for alias in node.names if alias.name == bug.function]:
        alias.asname = new_names[alias.name] = f"lessons_{alias.name}"  # which the mutant calls or extends
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = new_names.get(node.id, node.id)
    return tree


def _wrong_definition(bug: Bug) -> Definition:
    """Return the tree of the wrong function or class, under the lesson's name."""
    [wrong] = [n for n in _wrong_tree(bug).body if isinstance(n, Definition) and n.name == bug.function]
    return wrong


def _wrong_code(bug: Bug) -> str:
    tree, (_, right) = _wrong_tree(bug), lessons_definition(bug)
    if (doc := ast.get_docstring(right)) is not None and isinstance(right, ast.FunctionDef):
        text = textwrap.indent(doc, "    ").strip()
        [wrong] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == bug.function]
        wrong.body.insert(0, ast.Expr(ast.Constant(text + "\n    " if "\n" in text else text)))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [ast.unparse(node) for node in tree.body if node not in imports]
    return "\n\n\n".join(filter(None, ["\n".join(ast.unparse(node) for node in imports), *others]))


def problem_of_bug(bug: Bug, tree: ast.Module, shown: str) -> tuple[str, str] | None:
    """Return a state and a sentence if the tests of a learner's file need not run, else None."""
    if ast.dump(tree) == ast.dump(ast.parse(bug.own_file())):
        return "unsolved", (
            f"{bug.symptom} {shown} is as it was: the mistake is still there. After a change, also a wrong "
            "one, the checker says what the lesson's tests find."
        )
    if not any(isinstance(node, Definition) and node.name == bug.function for node in tree.body):
        return "invalid", f"{shown} has no `{bug.function}`."
    return None


def solution_of(bug: Bug) -> str:
    """Return the mistake in a sentence, the lines that differ where they are few, and the lesson's code."""
    source, right = lessons_definition(bug)
    wrong = _wrong_definition(bug)
    parts = [textwrap.fill(f"The mistake: {bug.mistake}", 108, initial_indent="# ", subsequent_indent="# ")]
    if difflib.SequenceMatcher(None, _lines(wrong), _lines(right), autojunk=False).ratio() >= ALIKE:
        changes = [f"#   {line}" for line in _changes(wrong, right)]
        parts.append("\n".join(["# What to change (- wrong, + right):", *changes]))
    return "\n#\n".join(parts) + "\n# The lesson's own code:\n\n" + source


def _changes(wrong: Definition, right: Definition) -> list[str]:
    changes = list(difflib.unified_diff(_lines(wrong), _lines(right), n=0, lineterm=""))
    return [line.rstrip() for line in changes if not line.startswith(("---", "+++", "@@"))]


def _lines(definition: Definition) -> list[str]:
    """Return the lines of a definition's body, without its docstring and imports."""
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    statements = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return [line for node in statements for line in ast.unparse(node).splitlines()]
