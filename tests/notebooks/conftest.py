"""`make check-notebooks` executes them; a plain `pytest` compares their files only."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what executes notebooks unless this folder was asked for."""
    here = Path(__file__).parent
    asked_for = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    is_asked_for = any(path.resolve().is_relative_to(here) for path in asked_for)
    return (
        True
        if collection_path.name in ("test_execution.py", "test_jupyterlab.py") and not is_asked_for
        else None
    )
