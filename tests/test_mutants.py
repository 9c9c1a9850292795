"""Every mutant in exercises/mutants is noticed by the test it names, and that test passes without it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import exercises.mutants
from exercises.failure import failure_of
from lab.ranks import RankError
from lab.replace import replaced
from tests.caches import without_new_results
from tests.passed import PASSED

NAMES = sorted(path.stem for path in Path(exercises.mutants.__path__[0]).glob("[!_]*.py"))


def load(name: str) -> tuple[ModuleType, Callable[[], None]]:
    """The mutant's file and its killer; fails when a field is missing or the killer wants arguments."""
    file = importlib.import_module(f"exercises.mutants.{name}")
    assert (file.__doc__ or "").strip(), f"{name}: the docstring must say what a user would see"
    for field in ("TARGET", "KILLER", "mutant"):
        assert hasattr(file, field), f"{name} has no {field}"
    module, _, test = file.KILLER.rpartition(".")
    killer = getattr(importlib.import_module(module), test, None)
    assert killer is not None, f"{name}: there is no test {file.KILLER}"
    assert not inspect.signature(killer).parameters, f"{name}: {test} must be a test without arguments"
    return file, killer


def outcome(killer: Callable[[], None]) -> BaseException | None:
    try:
        killer()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest's own failures are no Exceptions
        return error
    return None


@functools.cache
def outcome_without_a_mutant(killer: Callable[[], None]) -> BaseException | None:
    """Once for all mutants that name it, and not again where pytest has just seen it pass."""
    return None if killer in PASSED else outcome(killer)


def is_killed(error: BaseException, fails_with: str | tuple[str, ...] | None) -> bool:
    """A failed assertion, here or in a rank; any other error must be one that the file announces."""
    if fails_with is not None:
        texts = (fails_with,) if isinstance(fails_with, str) else fails_with
        return any(text in str(error) for text in texts)
    return isinstance(error, AssertionError) or (
        isinstance(error, RankError) and "AssertionError" in str(error)
    )


def likely_cause_of(file: ModuleType, error: BaseException | None) -> str:
    """What the checker of exercises tells a learner whose code fails as this mutant does."""
    assert error is not None
    return failure_of(error, file.KILLER.replace(".test_", "::test_"))["cause"] or ""


def names_the_cause(file: ModuleType, text: str) -> bool:
    """Whether a likely cause is one of those that the mutant expects; a mutant without any expects none."""
    causes = getattr(file, "CAUSE", "")
    return any(cause in text for cause in ((causes,) if isinstance(causes, str) else causes))


def is_killed_at_once(file: ModuleType, killer: Callable[[], None]) -> bool:
    """Whether the mutant is killed, for the right reason, by a killer that has not run without it."""
    with without_new_results(), replaced(file.TARGET, file.mutant):
        error = outcome(killer)
    is_right = error is not None and is_killed(error, getattr(file, "FAILS_WITH", None))
    return is_right and names_the_cause(file, likely_cause_of(file, error))


def judge(name: str) -> None:
    """Fail unless the killer passes without the mutant, and fails for the right reason with it."""
    file, killer = load(name)
    if (error := outcome_without_a_mutant(killer)) is not None:
        pytest.fail(f"{file.KILLER} fails without the mutant:\n{error}")
    with replaced(file.TARGET, file.mutant):
        error = outcome(killer)
    if error is None:
        pytest.fail(f"{name} survives: {file.KILLER} did not notice it")
    assert is_killed(error, getattr(file, "FAILS_WITH", None)), f"{name} fails for another reason:\n{error}"
    named = likely_cause_of(file, error)
    if not names_the_cause(file, named):  # on a busy machine a rank's evidence may come too late
        with replaced(file.TARGET, file.mutant):
            named = likely_cause_of(file, outcome(killer))
    assert names_the_cause(file, named), f"the checker takes {name} for something else: {named or error}"


@pytest.mark.parametrize("name", NAMES)
def test_the_mutant_is_killed_by_the_test_it_names(name: str, request: pytest.FixtureRequest):
    file, killer = load(name)
    # A killer that is a test of this run has to pass there. It is not run without the mutant a second time.
    runs_anyhow = killer in {getattr(item, "function", None) for item in request.session.items}
    if not (runs_anyhow and is_killed_at_once(file, killer)):
        judge(name)


def test_there_are_mutants_and_each_has_a_symptom_of_its_own():
    symptoms = [importlib.import_module(f"exercises.mutants.{name}").__doc__ for name in NAMES]
    assert len(NAMES) >= 6
    assert len(set(symptoms)) == len(symptoms)


def test_the_checker_names_the_cause_of_every_mutant_of_a_technique():
    files = [importlib.import_module(f"exercises.mutants.{name}") for name in NAMES]
    without = {file.TARGET: file.__name__ for file in files if not getattr(file, "CAUSE", "")}
    kinds = tuple(exercises.mutants.WITHOUT_A_CAUSE)
    assert {target: name for target, name in without.items() if not target.startswith(kinds)} == {}
    for kind in kinds:
        assert any(target.startswith(kind) for target in without), f"no mutant of {kind} is without a cause"


def test_a_mutant_that_does_not_differ_would_be_reported_as_a_survivor(monkeypatch):
    file = importlib.import_module("exercises.mutants.ring_chunk_off_by_one")
    monkeypatch.setattr(file, "mutant", importlib.import_module("comm.algorithms.pipelined_ring").chunk_sent)
    with pytest.raises(pytest.fail.Exception, match="ring_chunk_off_by_one survives"):
        judge("ring_chunk_off_by_one")


def test_a_mutant_that_only_crashes_would_be_reported(monkeypatch):
    def crash(*args) -> None:
        raise RuntimeError("not a wrong result")

    file = importlib.import_module("exercises.mutants.mean_divided_twice")
    monkeypatch.setattr(file, "mutant", crash)
    with pytest.raises(AssertionError, match="mean_divided_twice fails for another reason"):
        judge("mean_divided_twice")


@functools.cache
def doubled(number: int) -> int:
    return 2 * number


def test_what_is_cached_beside_a_mutant_is_forgotten_and_what_was_there_stays():
    with without_new_results():
        doubled(3)
    assert doubled.cache_info().currsize == 0
    doubled(4)
    with without_new_results():
        doubled(4)
    assert doubled.cache_info().currsize == 1
