"""Forget what functions of the workbook have cached, where it must not outlive a `with` block."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from exercises.catalog.exercise import LESSON_PACKAGES

OURS = LESSON_PACKAGES | {"tests", "exercises", "benchmarks"}


def caches() -> dict[functools._lru_cache_wrapper, int]:
    """Return the number of entries of each function that caches its results."""
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
