"""Run anything with one function or class replaced, here and in every rank started from here.

Exercises put the learner's implementation in a lesson's place and mutants put a wrong one there; both are
then judged by the lesson's own tests. `from module import name` copies a reference, so the
replacement is written wherever the original is bound, not only where it was defined.
"""

import contextlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_active: dict[str, Any] = {}


def active() -> dict[str, Any]:
    """The replacements now in force, by dotted path; `run_ranks` sends them to its ranks."""
    return dict(_active)


@contextlib.contextmanager
def replaced(path: str, implementation: Any) -> Iterator[None]:
    """Put `implementation` in the place of `path`, such as "comm.cost.seconds" or "module.Class.method".

    Raises LookupError when nothing has that name.
    """
    owner, name = _locate(path)
    original = owner.__dict__[name]
    own_bindings = _bindings(implementation, path)
    previous = _active.get(path)
    _active[path] = implementation
    for place, binding in [(owner, name), *_bindings(original, path)]:
        setattr(place, binding, implementation)
    try:
        yield
    finally:
        # Modules that were first imported meanwhile have the implementation under the original's name.
        for place, binding in [(owner, name), *_bindings(implementation, path)]:
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


def _bindings(value: Any, path: str) -> list[tuple[Any, str]]:
    """Where modules bind this very object, which is to be at `path`: the modules and the names.

    A library binds nothing of ours, so it is searched only for what is at home in a library. That is not
    for the search's sake: reading an object counts a reference, and so a rank that reads thousands of modules
    has to copy the pages with them, which it shares with the process that it was forked from.
    """
    packages = {name.partition(".")[0] for name in list(sys.modules)}
    if not _is_library(path.partition(".")[0]):
        packages = {name for name in packages if not _is_library(name)}
    return [
        (module, binding)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages
        for binding, bound in list(getattr(module, "__dict__", {}).items())
        if bound is value
    ]


def _is_library(package: str) -> bool:
    """Whether it is Python's own or was installed: a notebook, a script and what is made by hand are not."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)
