"""A rehearsal on GPUs that are not there, by `make rehearse`; a plain `pytest` leaves these tests out."""

import sys
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "tests.fake_gpu.device" in sys.modules else True
