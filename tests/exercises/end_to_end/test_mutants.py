"""Every mutant in exercises/mutants is noticed by the test it names, and that test passes without it."""

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.checker.compared import compared_in
from exercises.checker.failure import failure_of
from exercises.checker.run_tests import arguments_of
from exercises.find_the_bug import implementation
from exercises.mutants import Mutant, all_mutants
from lab import ranks
from lab.ranks import RankError
from lab.replace import replaced

ranks.describe = compared_in
MUTANTS = all_mutants()
OURS = LESSON_PACKAGES | {"tests", "exercises", "benchmarks"}


def caches() -> dict[functools._lru_cache_wrapper, int]:
    """Return the number of entries of each function of ours that caches its results."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in OURS]
    values = [value for module in modules for value in list(vars(module).values())]
    found = {value for value in values if isinstance(value, functools._lru_cache_wrapper)}
    return {function: function.cache_info().currsize for function in found}


@contextmanager
def without_new_results() -> Iterator[None]:
    """At the end, empty the caches that have grown in the block."""
    before = caches()
    try:
        yield
    finally:
        for function, size in caches().items():
            if size > before.get(function, 0):
                function.cache_clear()


@functools.cache
def killer_of(mutant_killer: str) -> Callable[[], None]:
    """Return the test with this id, with its argument where the id has one; fail if there is none."""
    file, _, test = mutant_killer.partition(".py::")
    name, _, parameter = test.partition("[")
    killer = getattr(importlib.import_module(file.replace("/", ".")), name, None)
    assert killer is not None, f"there is no test {mutant_killer}"
    arguments = arguments_of(killer, parameter.rstrip("]"))
    assert inspect.signature(killer).parameters.keys() == arguments.keys(), f"{mutant_killer} needs fixtures"
    return functools.partial(killer, **arguments)


def outcome(killer: Callable[[], None]) -> BaseException | None:
    try:
        with without_new_results():
            killer()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest's own failures are no Exceptions
        return error
    return None


outcome_without_a_mutant = functools.cache(outcome)  # once for all mutants that name the killer


def is_killed(mutant: Mutant, error: BaseException) -> bool:
    """A failed assertion, here or in a rank; any other error must be one that the mutant announces."""
    if mutant.fails_with:
        return any(text in str(error) for text in mutant.fails_with)
    return isinstance(error, AssertionError) or (
        isinstance(error, RankError) and "AssertionError" in str(error)
    )


def likely_cause_of(mutant: Mutant, error: BaseException | None) -> str:
    """What the checker of exercises tells a learner whose code fails as this mutant does."""
    assert error is not None
    return failure_of(error, mutant.killer)["cause"] or ""


def names_the_cause(mutant: Mutant, text: str) -> bool:
    """Whether a likely cause is one of those that the mutant expects; a mutant without any expects none."""
    return not mutant.cause or any(cause in text for cause in mutant.cause)


def judge(mutant: Mutant, wrong: Callable[..., object] | None = None) -> None:
    """Fail unless the killer passes without the mutant, and fails for the right reason with it."""
    killer, wrong = killer_of(mutant.killer), wrong or implementation(mutant)
    if (error := outcome_without_a_mutant(killer)) is not None:
        pytest.fail(f"{mutant.killer} fails without the mutant:\n{error}")
    with replaced(mutant.target, wrong):
        error = outcome(killer)
    if error is None:
        pytest.fail(f"{mutant.name} survives: {mutant.killer} did not notice it")
    assert is_killed(mutant, error), f"{mutant.name} fails for another reason:\n{error}"
    named = likely_cause_of(mutant, error)
    if not names_the_cause(mutant, named):  # on a busy machine a rank's evidence may come too late
        with replaced(mutant.target, wrong):
            named = likely_cause_of(mutant, outcome(killer))
    assert names_the_cause(mutant, named), (
        f"the checker takes {mutant.name} for something else: {named or error}"
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed_by_the_test_it_names(name: str):
    judge(MUTANTS[name])


def test_a_text_that_is_not_once_in_the_lessons_code_is_an_error():
    mutant = dataclasses.replace(MUTANTS["gradient_summed"], changes={"parameter.grad": "grad"})
    with pytest.raises(LookupError, match="This is 3 times in the lesson's code, and not once"):
        mutant.changed("parameter.grad = 1\nparameter.grad += parameter.grad")


def test_a_mutant_that_does_not_differ_would_be_reported_as_a_survivor():
    mutant = MUTANTS["ring_chunk_off_by_one"]
    right = importlib.import_module("comm.algorithms.pipelined_ring").chunk_sent
    with pytest.raises(pytest.fail.Exception, match="ring_chunk_off_by_one survives"):
        judge(mutant, right)
