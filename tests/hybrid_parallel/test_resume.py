"""A run on a mesh continues from its checkpoint, on the same mesh bit for bit, and on any other."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_parallel.test_run import summaries

Way = tuple[int, dict[str, Any]]  # ranks, and their sizes


def resumed(folder: Path, first: Way, second: Way) -> dict[str, Any]:
    """Train 2 steps in the first way and 2 more in the second; return the second summary."""
    (ranks_before, before), (ranks_after, after) = first, second
    summaries(ranks_before, [before | {"steps": 2, "checkpoint": str(folder)}])
    return summaries(ranks_after, [after | {"steps": 4, "checkpoint": str(folder), "resume": True}])[0]


@pytest.mark.parametrize(
    "way",
    [(2, {"pipeline": 2, "microbatches": 2}), (4, {"tensor": 2, "zero": 3, "sequence_parallel": True})],
    ids=str,
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, way: Way):
    ranks, sizes = way
    [straight] = summaries(ranks, [sizes | {"steps": 4}])
    going_on = resumed(tmp_path, way, way)
    assert going_on["steps"] == 2
    for what in ("last_loss", "validation_loss", "replica_digest"):
        assert going_on[what] == straight[what]


def test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was():
    mlp = {"model": "mlp"}
    expected = summaries(1, [{"steps": 4}, mlp | {"steps": 4}])
    meshes: list[tuple[Way, Way]] = [
        ((4, {"tensor": 2, "zero": 3}), (4, {"pipeline": 2, "microbatches": 2, "zero": 1})),
        ((2, mlp | {"pipeline": 2, "microbatches": 2}), (2, mlp | {"tensor": 2})),
    ]
    for (first, second), alone in zip(meshes, expected, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            going_on = resumed(Path(folder), first, second)
        for what in ("last_loss", "validation_loss"):
            assert going_on[what] == pytest.approx(alone[what], rel=1e-5), (first, second)
