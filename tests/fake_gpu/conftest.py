"""Run these tests only in `make rehearse`, on fake GPUs: a plain `pytest` leaves them out."""

import sys
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "tests.fake_gpu.device" in sys.modules else True
