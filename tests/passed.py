"""The test functions that have passed in this session, as tests/conftest.py notes them."""

from collections.abc import Callable
from typing import Any

PASSED: set[Callable[..., Any]] = set()
