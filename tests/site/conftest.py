"""The site and its pages. `make check-site` builds and tests the site; a plain `pytest` tests only pages."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs the built site unless this folder was asked for."""
    here = Path(__file__).parent
    asked_for = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    is_asked_for = any(path.resolve().is_relative_to(here) for path in asked_for)
    return True if collection_path == here / "built" and not is_asked_for else None
