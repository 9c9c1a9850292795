"""Importing this module makes assertions tell what they compare, here and on each rank that is started here.

Import it before any test: pytest rewrites the assertions of a test while the test is imported.
"""

import os
from typing import Any

import torch
from _pytest.assertion import install_importhook, util
from _pytest.config import _prepareconfig

from exercises.checker.compared import Compared, compared_in, remember
from lab import ranks

_equal = torch.equal


def equal(a: Any, b: Any) -> bool:
    """Do what torch.equal does, remember what differs, and take None for a tensor that differs."""
    if a is not None and b is not None and _equal(a, b):
        return True
    remember("==", a, b)
    return False


def describe(error: BaseException) -> Compared | None:
    """Return what a rank has compared. A rank that unpickles this function imports this module."""
    return compared_in(error)


torch.equal = equal  # type: ignore[assignment]
ranks.describe, util._reprcompare = describe, remember
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
install_importhook(_prepareconfig(["--noconftest", "-p", "no:cacheprovider"])).mark_rewrite("tests")
