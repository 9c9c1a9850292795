"""Keep the caller's script from running again in the processes that multiprocessing starts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    saved: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        main.__dict__.update(saved)
