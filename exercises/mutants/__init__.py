"""This package holds wrong implementations that people have really shipped, in one file for each lesson.

    @mutant(
        target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",  # what it replaces
        killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean",  # the test that must fail
        cause="sum over ranks that should be a mean",  # a part of what checker/causes.py says, if it knows
        symptom="With SGD, twice as many ranks double the learning rate.",  # what a user sees
        fails_with="The ranks do not fit together",  # unless an assertion fails
    )
    def gradient_summed(self) -> None:
        \"\"\"Gradients are summed, not averaged: with SGD training diverges on many ranks.\"\"\"

The docstring says the symptom and, after a colon, the mistake. `symptom` is needed where the docstring's
first part tells the mistake: the mutants of techniques are exercises, too (exercises/find_the_bug.py). The
killer has no arguments. `cause` and `fails_with` may be tuples, of which one must be named (a race decides
which). A mutant of a method is a function that replaces the whole method, so that it is wrong by what it
does, and not right where it does nothing. tests/test_mutants.py runs all mutants.

A mutant must not call its own target: while the mutant is in place, that name is the mutant.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation with what is known of it. Its name is that of its function or class."""

    implementation: Callable[..., Any]
    target: str
    killer: str
    cause: tuple[str, ...]
    fails_with: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.implementation.__name__


_registered: list[Mutant] = []


def mutant(
    *,
    target: str,
    killer: str,
    cause: str | tuple[str, ...] = (),
    symptom: str = "",
    fails_with: str | tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Mark a function or class as a mutant. `symptom` is for those who read the file and do not run it."""

    def register(implementation: Any) -> Any:
        _registered.append(Mutant(implementation, target, killer, _tuple(cause), _tuple(fails_with)))
        return implementation

    return register


def files() -> list[Path]:
    """Return the files of mutants, one for each lesson."""
    return sorted(Path(__file__).parent.glob("[!_]*.py"))


@functools.cache
def all_mutants() -> dict[str, Mutant]:
    """Import all mutants, and return them by name."""
    for file in files():
        importlib.import_module(f"{__name__}.{file.stem}")
    return {each.name: each for each in _registered}


def _tuple(texts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts
