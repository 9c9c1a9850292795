"""Replace a function or a class for a while, in this process and in every rank that it starts.

An exercise replaces a part of a lesson with the learner's implementation, and a mutant replaces it with a
wrong one. The lesson's own tests judge both. `from module import name` copies a reference, and so does a
table of functions. So the replacement is written to every module, and to every table of a module, that has
the original, not only to the module that defines it.
"""

import contextlib
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_active: dict[str, Any] = {}


def active() -> dict[str, Any]:
    """Return the active replacements by dotted path. `run_ranks` sends them to its ranks."""
    return dict(_active)


@contextlib.contextmanager
def replaced(path: str, implementation: Any) -> Iterator[None]:
    """Replace the object at `path`, such as "comm.cost.seconds", in a `with` block, or raise LookupError."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
        original = owner.__dict__[name]
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise LookupError(f"Nothing to replace at {path}: no function or class has that name.") from error
    own_bindings = _bindings(implementation, path)
    before = active()
    _active[path] = implementation
    if isinstance(original, classmethod | staticmethod) and not isinstance(implementation, type(original)):
        implementation = type(original)(implementation)
    for place, binding in [(owner, name), *_bindings(original, path)]:
        _bind(place, binding, implementation)
    try:
        yield
    finally:
        # Modules that were imported in the meantime bind the implementation under the original's name.
        for place, binding in [(owner, name), *_bindings(implementation, path)]:
            if not any(place is own and binding == bound for own, bound in own_bindings):
                _bind(place, binding, original)
        _active.clear()
        _active.update(before)


@contextlib.contextmanager
def apply(replacements: dict[str, Any]) -> Iterator[None]:
    """Apply several replacements in a `with` block."""
    with contextlib.ExitStack() as stack:
        for path, implementation in replacements.items():
            stack.enter_context(replaced(path, implementation))
        yield


def _bind(place: Any, name: Any, value: Any) -> None:
    if isinstance(place, dict):
        place[name] = value
    else:
        setattr(place, name, value)


def _bindings(value: Any, path: str) -> list[tuple[Any, Any]]:
    """Return the places that have this object, which belongs to `path`, each with the name it has there.

    A place is the namespace of a module, or a dictionary that a module has at its top level, or one in that.

    Libraries do not bind our objects, and reading theirs would copy memory pages that a forked rank shares.
    """
    own_package = path.partition(".")[0]
    return [
        (place, binding)
        for name, module in list(sys.modules.items())
        if (package := name.partition(".")[0]) == own_package or not _is_library(package)
        for place in _tables(getattr(module, "__dict__", {}))
        for binding, bound in list(place.items())
        if bound is value
    ]


def _tables(namespace: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield a module's namespace, its dictionaries, and the dictionaries in those."""
    yield namespace
    for name, table in list(namespace.items()):
        if type(table) is dict and table is not _active and not name.startswith("__"):
            yield table
            yield from [inner for inner in list(table.values()) if type(inner) is dict]


def _is_library(package: str) -> bool:
    """Return whether a package is Python's own or installed, not a notebook, a script or made in memory."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)
