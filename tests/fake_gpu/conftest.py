"""Run these tests only in `make rehearse`: a plain `pytest` leaves them out.

On real GPUs (torch has CUDA) only those run that need no fake: nothing can be broken or slowed down there.
"""

import os
import sys
from pathlib import Path

import pytest

REAL = "REHEARSE_ON_REAL_GPUS"
NEED_THE_FAKE = ("breaks", "figures", "host_waits", "odd_machines", "rules")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if REAL in os.environ:
        return True if collection_path.stem.removeprefix("test_") in NEED_THE_FAKE else None
    return None if "tests.fake_gpu.device" in sys.modules else True
