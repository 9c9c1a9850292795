"""Make an exercise of each mutant: a file with the mistake, which the learner finds and fixes.

      mutants/data_parallel.py   "gradient_summed"                named, explained, and killed by a test
      bugs/bug_naive_787.py      def finish_gradient_sync(self)   the lesson's function with the mistake

The exercise has a name that gives nothing away, and keeps it when mutants are added. It is graded by the test
that kills the mutant, by those that kill other mutants of the same function, and by those of exercises on the
same function or class, so that one mistake cannot be exchanged for another.
"""

import ast
import difflib
import functools
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from exercises.catalog import EXERCISES, ROOT, Exercise
from exercises.lesson_source import definition, imports, lines_of, without_comments
from exercises.mutants import Mutant, all_mutants

MAX_TESTS = 4
MOST_LINES = (4, 9, 15, 22)  # to read and to write, for the difficulties 1 to 4
MINUTES = (10, 15, 20, 25, 30)
_SHARDS = (
    "Write down which tensors the ranks have in full and which as shards, first forward and then backward."
)
_FIRST = {  # what to look at first, by the beginnings of targets in the order of the lessons
    "comm": "With 3 ranks, write down who sends what to whom in each step. Compare it with the docstring.",
    "data_parallel": "With 2 ranks and one weight, print its gradient before and after each message.",
    "zero": "With 2 ranks and 3 numbers, write down which rank owns which, and when each is sent and freed.",
    "comm.functions": _SHARDS,
    "tensor_parallel": _SHARDS,
    "pipeline_parallel": "Draw the rows of 2 ranks with 3 microbatches, and follow one there and back.",
    "context_parallel": "With 2 ranks and 4 tokens, write down which query meets which keys, and where.",
    "expert_parallel": "With 2 ranks and 2 experts, follow a token there and back, and then its gradient.",
    "hybrid_parallel": "Take small numbers, compute the result on paper, and compare it with the function's.",
    "low_communication": "With 2 ranks and 2 steps, write down what each has sent, and what it still owes.",
    "training": "Follow what two ranks do next if what the function reads is not the same on both.",
    "lab": "Take the smallest input that shows the symptom, and print what the function has after each line.",
}
ORDER = tuple(_FIRST)
_FIRST_IN_A_FILE = {  # in place of the lesson's
    "low_communication.train_local_sgd": "List what a rank has (parameters, state, counters), and say of "
    "each who may change it at an average.",
    "low_communication.train_diloco_plain": "With 2 ranks, one weight and H = 1, compute two rounds on "
    "paper: the change, its mean, the momentum and the anchor.",
    "low_communication.train_diloco": "With 2 ranks, two weights, H = 2 and a delay of 1, compute two rounds "
    "on paper: what is sent when, its mean, the anchor, and what each rank has then.",
    "low_communication.compressors": "Give each of 2 ranks a few numbers of its own, and write down what a "
    "rank sends, and what each has when all has arrived.",
    "low_communication.train_hsdp": "With 4 ranks on 2 machines, write down which ranks talk to each other, "
    "how much, and over which link.",
}
TOOLS = (
    "Tools: the checker says which rank, which value and by how much; lab/ranks shows where ranks hang;\n"
    "--trace FOLDER draws what each rank did when; exercises/README.md lists more."
)
_NOT_TAUGHT = re.compile(r"^@(staticmethod|once_differentiable)\n", re.M)  # no part of a technique
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
        """Return the learner's file: the lesson's function with the mistake, and without comments."""
        place = f"`{self.qualified_name}` of {self.lesson.relative_to(ROOT)}"
        text = f"Find the bug. {self.symptom} The mistake is in {place}."
        check = f"Fix it below, and check it with `python -m exercises check {self.name}`."
        code = _wrong_code(self)
        lines = [textwrap.fill(text, 108), "", check, TOOLS, *([PATTERN] if "pattern=" in code else [])]
        return '"""' + "\n".join(lines) + '\n"""\n\n' + code + "\n"


@functools.cache
def bugs() -> tuple[Bug, ...]:
    """Return all exercises of this kind, in the order of the lessons, and in each the easiest first.

    Where the user has changed the line of a lesson that a mutant changes, this mutant is left out.
    """
    made = []
    for mutant in all_mutants().values():
        with suppress(LookupError, SyntaxError):
            made.append(_bug(mutant))
    # A mistake in a function that is an exercise may be the one which the learner has just made there.
    return tuple(sorted(made, key=lambda bug: (lesson_of(bug), bug.difficulty, is_written(bug), bug.name)))


def is_written(bug: Bug) -> bool:
    """Return whether an exercise asks for the function that has the mistake."""
    return any(bug.target in exercise.targets for exercise in EXERCISES)


def exercises_on(target: str) -> list[Exercise]:
    """Return the exercises on a function, and after them those on others of its class."""
    owner = target.rpartition(".")[0]
    return [exercise for exercise in EXERCISES if target in exercise.targets] + [
        exercise
        for exercise in EXERCISES
        if target not in exercise.targets
        and owner != exercise.module
        and any(other == owner or other.startswith(f"{owner}.") for other in exercise.targets)
    ]


def lesson_of(bug: Bug) -> int:
    """Return the place in ORDER of the lesson that teaches what the bug is about."""
    return ORDER.index(_beginning(bug, ORDER))


def _beginning(bug: Bug, beginnings: Iterable[str]) -> str:
    """Return the longest of these beginnings that the bug's target has."""
    return max((one for one in beginnings if f"{bug.target}.".startswith(f"{one}.")), key=len)


def _bug(mutant: Mutant) -> Bug:
    tests = [mutant.killer]
    tests += [other.killer for other in all_mutants().values() if other.target == mutant.target]
    tests += [test for exercise in exercises_on(mutant.target) for test in exercise.tests]
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
        mistake=mutant.sentence,
    )
    right, wrong = definition(draft, draft.target), _wrong_function(draft)
    size = len(_lines(wrong)) + len(_changes(wrong, right))
    difficulty = 1 + sum(size > most for most in MOST_LINES)
    lesson = draft.lesson.stem.removeprefix("train_")
    first = _FIRST | _FIRST_IN_A_FILE
    new = {
        "name": f"bug_{lesson}_{hashlib.sha256(mutant.name.encode()).hexdigest()[:3]}",
        "difficulty": difficulty,
        "minutes": MINUTES[difficulty - 1],
        "hints": (
            f"{first[_beginning(draft, first)]} The test that notices it: "
            f'"{mutant.killer.rpartition("::test_")[2].replace("_", " ").replace("[", " [")}".',
            f"What happens: {mutant.sentence}",
            _where(wrong, right),
        ),
    }
    return Bug(**(vars(draft) | new))


def _where(wrong: ast.FunctionDef, right: ast.FunctionDef) -> str:
    """Return the third hint: the first line that differs, or after which something is missing."""
    before, after = _lines(right), _lines(wrong)
    for kind, _, _, start, _ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if len(before) == len(after) == 1:
            return _where_in_line(after[0], before[0])
        if kind in ("replace", "insert"):
            return f"Look at this line, and at what follows from it: `{after[start].strip()}`"
        if kind == "delete":
            where, line = ("before", after[0]) if start == 0 else ("after", after[start - 1])
            return f"Something is missing {where} this line: `{line.strip()}`"
    return "The lines are the lesson's. What stands around the function, such as a decorator, is missing."


def _where_in_line(wrong: str, right: str) -> str:
    """Return the third hint for the only line of a function: the part that differs."""
    before, after = (re.findall(r"\w+|\s+|.", line) for line in (right, wrong))
    changed = [
        code for code in difflib.SequenceMatcher(None, before, after).get_opcodes() if code[0] != "equal"
    ]
    begin, end = changed[0][3], changed[-1][4]
    if part := "".join(after[begin:end]).strip():
        return f"Look at this part of the line: `{part}`"
    return f"Something is missing in the line, after `{''.join(after[:begin]).strip()}`"


def implementation(mutant: Mutant) -> Callable[..., Any]:
    """Return the wrong function, as the file of its exercise defines it at first."""
    bug = _bug(mutant)
    module = ModuleType(f"wrong_{mutant.name}")  # no importable one, so ranks get the function itself
    exec(compile(bug.own_file(), f"{bug.name}.py", "exec"), vars(module))
    return vars(module)[bug.function]


def lessons_code(bug: Bug) -> str:
    """Return the lesson's source of the function that has the mistake, with its decorators."""
    right = definition(bug, bug.target)
    first = min(node.lineno for node in (right, *right.decorator_list))
    return lines_of(bug.lesson, first, right.end_lineno)


def _wrong_code(bug: Bug) -> str:
    """Return the lesson's function with the mistake, and the imports that it needs."""
    code = lessons_code(bug)
    [right] = ast.parse(code).body
    assert isinstance(right, ast.FunctionDef)
    lines, docstring = code.splitlines(), []
    if ast.get_docstring(right) is not None:
        place = slice(right.body[0].lineno - 1, right.body[0].end_lineno)
        docstring, lines[place] = lines[place], []
    code = all_mutants()[bug.mutant].changed(without_comments("\n".join(lines)))
    owner = bug.qualified_name.rpartition(".")[0]
    code = _NOT_TAUGHT.sub("", code).replace("super()", f"super({owner}, self)")
    [wrong] = ast.parse(code).body
    assert isinstance(wrong, ast.FunctionDef)
    needed = imports(bug, [wrong], own=[] if owner else [bug.function])
    lines, body = code.splitlines(), wrong.body[0].lineno - 1
    code = "\n".join([*lines[:body], *docstring, *lines[body:]])
    if re.search(name := rf"(?<![\w.]){bug.function}\b", needed):  # a method has the name of what it calls
        needed = re.sub(name, rf"{bug.function} as lessons_{bug.function}", needed)
        code = re.sub(rf"(?<!def ){name}(?=\()", f"lessons_{bug.function}", code)
    return "\n\n\n".join(filter(None, [needed, code]))


def _wrong_function(bug: Bug) -> ast.FunctionDef:
    """Return the tree of the wrong function."""
    [wrong] = [n for n in ast.parse(_wrong_code(bug)).body if isinstance(n, ast.FunctionDef)]
    return wrong


def problem_of_bug(bug: Bug, tree: ast.Module, shown: str) -> tuple[str, str] | None:
    """Return a state and a sentence if the tests of a learner's file need not run, else None."""
    if ast.dump(tree) == ast.dump(ast.parse(bug.own_file())):
        return "unsolved", (
            f"{bug.symptom} {shown} is as it was: the mistake is still there. After a change, also a wrong "
            "one, the checker says what the lesson's tests find."
        )
    if not any(isinstance(node, ast.FunctionDef) and node.name == bug.function for node in tree.body):
        return "invalid", f"{shown} has no `{bug.function}`."
    return None


def solution_of(bug: Bug) -> str:
    """Return the mistake in a sentence, the lines that differ, and the lesson's code."""
    mistake = textwrap.fill(f"The mistake: {bug.mistake}", 108, initial_indent="# ", subsequent_indent="# ")
    changes = [f"#   {line}" for line in _changes(_wrong_function(bug), definition(bug, bug.target))]
    parts = [mistake, "\n".join(["# What to change (- wrong, + right):", *changes])]
    return "\n#\n".join(parts) + "\n# The lesson's own code:\n\n" + lessons_code(bug) + "\n"


def _changes(wrong: ast.FunctionDef, right: ast.FunctionDef) -> list[str]:
    changes = list(difflib.unified_diff(_lines(wrong), _lines(right), n=0, lineterm=""))
    return [line.rstrip() for line in changes if not line.startswith(("---", "+++", "@@"))]


def _lines(function: ast.FunctionDef) -> list[str]:
    """Return the lines of a function's body, without its docstring, and with a method's plain `super()`."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = [line for node in body for line in ast.unparse(node).splitlines()]
    return [re.sub(r"super\(\w+, self\)", "super()", line) for line in lines]
