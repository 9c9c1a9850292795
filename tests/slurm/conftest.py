"""A real Slurm. `make slurm` runs these tests; a plain `pytest` leaves them out."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import CannotStart, SlurmCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    try:
        cluster = SlurmCluster().__enter__()
    except CannotStart as error:
        pytest.exit(f"Slurm is not tested: {error}.", returncode=0)
    with cluster._stack:
        yield cluster
