"""Run these tests only in `make rehearse`: a plain `pytest` leaves them out.

On real GPUs (torch has CUDA) only those run that need no fake: nothing can be broken or slowed down there.
"""

import os
import sys
from pathlib import Path

import pytest

REAL = "REHEARSE_ON_REAL_GPUS"
NEED_THE_FAKE = ("test_breaks.py", "test_figures.py", "test_host_waits.py", "test_rules.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if REAL in os.environ:
        return True if collection_path.name in NEED_THE_FAKE else None
    return None if "tests.fake_gpu.device" in sys.modules else True
