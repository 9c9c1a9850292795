"""Make an exercise of each mutant of a technique: a file with the mistake, which the learner finds and mends.

      mutants/data_parallel.py   def gradient_summed(self)        named, explained, and killed by a test
      bugs/bug_naive_7b2.py      def finish_gradient_sync(self)   the lesson's name and docstring, no hint

The exercise has a name that gives nothing away, and keeps it when mutants are added. It is graded by the test
that kills the mutant and by those that kill other mutants of the same function, so that one mistake cannot be
exchanged for another. Its difficulty is measured by the lines to read and to write (bug_difficulty.py).
"""

import ast
import copy
import functools
import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exercises import mutants
from exercises.bug_difficulty import MINUTES, difficulty_of
from exercises.bug_hints import Definition, hints_of
from exercises.catalog import EXERCISES, ROOT, Exercise

EQUIPMENT = ("lab.", "comm.rendezvous.keep_from_preempting")  # what helps the lessons is no technique
MAX_TESTS = 4
TOOLS = (
    "Tools: the checker says which rank, which value and by how much; lab/ranks shows where ranks hang;\n"
    "--trace FOLDER draws what each rank did when; exercises/README.md lists more."
)
# By what TARGET begins with, what is true of an implementation with a mistake. The first entry counts.
WRONG_IN_WHAT_WAY = (
    (("comm.exchange.", "comm.transport.cross_memory."), "It works, and it is not safe."),
    (
        (
            "comm.membership.",
            "comm.wire.handshake.",
            "comm.transport.stream_wire.StreamHandshake.",
            "comm.transport.streams.Streams.close",
            "pipeline_parallel.failure.",
        ),
        "It works as long as there is no error, and is wrong where there is one.",
    ),
    (
        (
            *("training.checkpoint.", "training.range_checkpoint."),
            *("hybrid_parallel.checkpoint.", "hybrid_parallel.state."),
        ),
        "It saves and loads checkpoints, and it is wrong.",
    ),
    (
        (
            "hybrid_parallel.planner.memory.",
            "hybrid_parallel.planner.step_time.",
            "hybrid_parallel.planner.machine.",
        ),
        "It chooses a plan, and its numbers are wrong.",
    ),
    (("training.evaluation.",), "It reports numbers, and they are wrong."),
    (("comm.",), "It runs, and it is wrong."),
    (("",), "It trains, and it is wrong."),
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

    @property
    def is_class(self) -> bool:
        """Tell whether the mistake is in a class that extends the lesson's, and not in a function."""
        return isinstance(lessons_definition(self)[1], ast.ClassDef)

    @property
    def in_what_way(self) -> str:
        """Return a sentence that says what works and what is wrong, such as a result or what is safe."""
        return next(text for kinds, text in WRONG_IN_WHAT_WAY if self.target.startswith(kinds))

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
    found = [mutant for mutant in described().values() if not mutant.target.startswith(EQUIPMENT)]
    order = (
        *("comm", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel", "context_parallel"),
        *("expert_parallel", "hybrid_parallel", "training"),
    )
    made = [_bug(mutant, found) for mutant in found]
    return tuple(
        sorted(made, key=lambda bug: (order.index(bug.target.partition(".")[0]), bug.difficulty, bug.name))
    )


@dataclass(frozen=True)
class Described:
    """A mutant as its file describes it, which is read and not imported."""

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
        cause = fields.get("cause", ())
        return Described(
            name=node.name,
            doc=" ".join((ast.get_docstring(node) or "").split()),
            target=fields["target"],
            killer=f"{module.replace('.', '/')}.py::{test}",  # as pytest names it
            cause=(cause,) if isinstance(cause, str) else cause,
            symptom=fields.get("symptom", ""),
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
        others = [each for each in file.body if each not in wanted and _name_of(each) in names]
        wanted.extend(others)
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


def _bug(mutant: Described, others: list[Described]) -> Bug:
    target = mutant.target
    tests = [mutant.killer, *(other.killer for other in others if other.target == target)]
    tests += [test for exercise in EXERCISES if exercise.target == target for test in exercise.tests]
    symptom = mutant.symptom or mutant.doc.partition(":")[0].rstrip(".") + "."
    draft = Bug(
        name="draft",
        title=f"The mistake in `{target.rpartition('.')[2]}`",
        target=target,
        tests=tuple(dict.fromkeys(tests))[:MAX_TESTS],
        difficulty=1,
        minutes=MINUTES[0],
        hints=("", "", ""),
        mutant=mutant.name,
        symptom=symptom,
        mistake=mutant.doc,
    )
    tree, right = _wrong_tree(draft), lessons_definition(draft)[1]
    test = mutant.killer.rpartition("::")[2]
    hints = hints_of(test, mutant.doc, symptom, right, _definition_of(draft, tree))
    difficulty = difficulty_of(tree, draft.function, right, mutant.killer)
    lesson = draft.lesson.stem.removeprefix("train_")
    name = f"bug_{lesson}_{hashlib.sha256(mutant.name.encode()).hexdigest()[:3]}"
    effort = {"difficulty": difficulty, "minutes": MINUTES[difficulty - 1]}
    return Bug(**{**vars(draft), **effort, "name": name, "hints": hints})


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
    mutant = described()[bug.mutant]
    tree = copy.deepcopy(ast.Module([*mutant.code], []))
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


def _wrong_code(bug: Bug) -> str:
    tree = _wrong_tree(bug)
    _, right = lessons_definition(bug)
    if (doc := ast.get_docstring(right)) is not None and isinstance(right, ast.FunctionDef):
        text = textwrap.indent(doc, "    ").strip()
        [wrong] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == bug.function]
        wrong.body.insert(0, ast.Expr(ast.Constant(text + "\n    " if "\n" in text else text)))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in tree.body if node not in imports]
    blocks = ["\n".join(ast.unparse(node) for node in imports), *(ast.unparse(node) for node in others)]
    return "\n\n\n".join(block for block in blocks if block)


def wrong_definition(bug: Bug) -> Definition:
    """Return the tree of the wrong function or class, under the lesson's name."""
    return _definition_of(bug, _wrong_tree(bug))


def _definition_of(bug: Bug, tree: ast.Module) -> Definition:
    [wrong] = [n for n in tree.body if isinstance(n, Definition) and n.name == bug.function]
    return wrong


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
