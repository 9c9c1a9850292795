"""This package holds wrong implementations that people have really shipped, in one file for each lesson.

    mutant(
        "gradient_summed",
        "Gradients are summed, not averaged: with SGD training diverges on many ranks.",
        target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",  # a function or method
        changes={'op="mean"': 'op="sum"'},  # what is right in its code, and what is wrong there
        killer=EQUIVALENCE + "test_a_gradient_is_the_mean_over_ranks",  # the test that must fail
        cause="sum over ranks that should be a mean",  # a part of what checker/causes.py says, if it knows
        symptom="With SGD, twice as many ranks double the learning rate.",  # what a user sees
        fails_with="The ranks do not fit together",  # unless an assertion fails
    )

The wrong function is the lesson's, without comments, and with the changes (exercises/find_the_bug.py), so it
cannot become outdated in silence: where a text is not found, that is an error. The text on the left is one or
more whole lines, with any indentation, or a part of a line, and occurs once. The other one may be empty.

The sentence says the symptom and, after a colon, the mistake. `symptom` is needed where its first part tells
the mistake: each mutant is an exercise, too. The killer has no arguments. `cause` and `fails_with` may be
tuples, of which one must be named (a race decides which). `make check-exercises` runs all mutants.
"""

import functools
import importlib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, and what is known of it. `killer` is pytest's name of a test."""

    name: str
    sentence: str
    target: str
    changes: Mapping[str, str]
    killer: str
    cause: tuple[str, ...]
    symptom: str
    fails_with: tuple[str, ...]

    def changed(self, code: str) -> str:
        """Return the code of the lesson's function with the mistake in it."""
        for right, wrong in self.changes.items():
            code = _replaced(code, right, wrong)
        return code


_registered: dict[str, Mutant] = {}


def mutant(
    name: str,
    sentence: str,
    *,
    target: str,
    changes: Mapping[str, str],
    killer: str,
    cause: str | tuple[str, ...] = (),
    symptom: str = "",
    fails_with: str | tuple[str, ...] = (),
) -> None:
    """Add a mutant to those that `all_mutants` returns."""
    if name in _registered:
        raise ValueError(f"There are two mutants {name}.")
    symptom = symptom or sentence.partition(":")[0].rstrip(".") + "."
    _registered[name] = Mutant(
        name, sentence, target, changes, killer, _tuple(cause), symptom, _tuple(fails_with)
    )


@functools.cache
def all_mutants() -> dict[str, Mutant]:
    """Import the files of all lessons, and return their mutants by name."""
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        importlib.import_module(f"{__name__}.{file.stem}")
    return dict(_registered)


def _replaced(code: str, right: str, wrong: str) -> str:
    """Return the code with `wrong` in place of `right`, which are whole lines or a part of one."""
    around = f"\n{code}\n"
    for depth in range(6):
        old, new = (textwrap.indent(text, "    " * depth) for text in (right, wrong))
        if around.count(f"\n{old}\n") == 1:
            return around.replace(f"\n{old}\n", f"\n{new}\n" if new else "\n").strip("\n")
    if code.count(right) != 1:
        raise LookupError(f"This is {code.count(right)} times in the lesson's code, and not once:\n{right}")
    return code.replace(right, wrong)


def _tuple(texts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts
