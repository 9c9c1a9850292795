"""Describe one exercise: which part of a lesson is taken out, which tests grade it, and what helps."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PICKLE = ".pickle"  # the ending of a file with functions that were defined in a notebook
LESSON_PACKAGES = {
    *("lab", "comm", "training", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel"),
    *("context_parallel", "expert_parallel", "low_communication", "hybrid_parallel"),
}


@dataclass(frozen=True)
class Exercise:
    """A function, method or class of a lesson that the learner writes, graded by the lesson's own tests.

    `target` is its dotted path, and `also` are the paths of others in the same file that make sense only
    together with it. `tests` are pytest's node ids. `difficulty` is 1 to 5, and `minutes` is a guess. `needs`
    names exercises that should be solved before. `doc` replaces the lesson's docstring of the target, and
    `docs` those of others, by name, where the lesson's would give the solution away. `beyond` names a target
    beyond correctness (exercises/checker/targets.py), which is measured when all tests have passed.

    `notebook` is the notebook to read first. The exercise's file lists the functions and classes that the
    lesson's code uses (lesson_source.py), and `helps`: what it uses of objects and no docstring explains.

    An open exercise has a `stub`, a specification and a signature, in place of the lesson's docstrings. What
    the stub imports from the lessons are the helpers. The targets may be classes. The tests
    know nothing of how the lesson's own code works: tests/exercises/other_ways.py solves each open exercise
    in another way.
    """

    name: str
    title: str
    target: str
    tests: tuple[str, ...]
    difficulty: int
    minutes: int
    hints: tuple[str, str, str]
    notebook: str = ""
    needs: tuple[str, ...] = ()
    doc: str | None = None
    also: tuple[str, ...] = ()
    docs: Mapping[str, str] = field(default_factory=dict)
    beyond: str | None = None
    helps: tuple[str, ...] = ()
    stub: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """The dotted paths of all functions that the learner writes."""
        return (self.target, *self.also)

    @property
    def module(self) -> str:
        """The dotted name of the lesson's file."""
        return module_of(self.target)

    @property
    def lesson(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    @property
    def function(self) -> str:
        """The name of the function that the learner writes, or of the first one."""
        return name_of(self.target)

    def qualified(self, target: str) -> str:
        """Return the name within the lesson's file, such as NaiveDataParallel.finish_gradient_sync."""
        return target.removeprefix(self.module + ".")

    @property
    def qualified_name(self) -> str:
        """The target's name within the lesson's file."""
        return self.qualified(self.target)

    @property
    def file(self) -> Path:
        """The learner's file, relative to the folder of exercises: comm/ring_all_gather.py."""
        return Path(self.folder, f"{self.name}.py")

    @property
    def folder(self) -> str:
        """The lesson's folder, such as comm."""
        return self.target.partition(".")[0]


@functools.cache
def module_of(target: str) -> str:
    """Return the dotted name of the lesson's file of a target: the longest part of it that is a file."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if ROOT.joinpath(*parts[:cut]).with_suffix(".py").is_file():
            return ".".join(parts[:cut])
    raise LookupError(f"there is no lesson file for {target}.")


def name_of(target: str) -> str:
    """Return the name of a target's function: gather_chunks of comm.algorithms.ring.gather_chunks."""
    return target.rpartition(".")[2]
