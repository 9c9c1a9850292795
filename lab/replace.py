"""Run anything with one function or class replaced, here and in every rank started from here.

Exercises put the learner's implementation in a lesson's place and mutants put a wrong one there; both are
then judged by the lesson's own tests. `from module import name` copies a reference, so the
replacement is written wherever the original is bound, not only where it was defined.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

_active: dict[str, Any] = {}


def active() -> dict[str, Any]:
    """The replacements now in force, by dotted path; `run_ranks` sends them to its ranks."""
    return dict(_active)


@contextlib.contextmanager
def replaced(path: str, implementation: Any) -> Iterator[None]:
    """Put `implementation` in the place of `path`, e.g. "comm.ring.chunk_index" or "module.Class.method".

    Raises LookupError when nothing has that name.
    """
    owner, name = _locate(path)
    original = owner.__dict__[name]
    own_bindings = _bindings(implementation)
    previous = _active.get(path)
    _active[path] = implementation
    for place, binding in [(owner, name), *_bindings(original)]:
        setattr(place, binding, implementation)
    try:
        yield
    finally:
        # Modules that were first imported meanwhile have the implementation under the original's name.
        for place, binding in [(owner, name), *_bindings(implementation)]:
            if (place, binding) not in own_bindings:
                setattr(place, binding, original)
        if previous is None:
            del _active[path]
        else:
            _active[path] = previous


@contextlib.contextmanager
def apply(replacements: dict[str, Any]) -> Iterator[None]:
    """Put several replacements in force at once."""
    with contextlib.ExitStack() as stack:
        for path, implementation in replacements.items():
            stack.enter_context(replaced(path, implementation))
        yield


def _locate(path: str) -> tuple[Any, str]:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        try:
            for part in parts[cut:-1]:
                owner = getattr(owner, part)
            owner.__dict__[parts[-1]]
        except (AttributeError, KeyError):
            break
        return owner, parts[-1]
    raise LookupError(f"Nothing to replace at {path}: no function or class has that name.")


def _bindings(value: Any) -> list[tuple[Any, str]]:
    """Where modules bind this very object: the modules and the names."""
    return [
        (module, binding)
        for module in list(sys.modules.values())
        for binding, bound in list(getattr(module, "__dict__", {}).items())
        if bound is value
    ]
