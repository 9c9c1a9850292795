"""A real Slurm. `make slurm` runs these tests; a plain `pytest` leaves them out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import CannotStart, SlurmCluster


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    here = Path(__file__).parent
    asked_for = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    return None if any(path.resolve().is_relative_to(here) for path in asked_for) else True


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    try:
        cluster = SlurmCluster().__enter__()
    except CannotStart as error:
        pytest.exit(f"Slurm is not tested: {error}.", returncode=0)
    with cluster._stack:
        yield cluster
