"""A run on a mesh continues from its checkpoint, on the same mesh bit for bit, and on any other.

tests/training/test_resume.py hands a GPT on from mesh to mesh.
"""

import tempfile

import pytest

from tests.hybrid_parallel.test_run import summaries


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path):
    run = {"layers": 2, "checkpoint": str(tmp_path), "pipeline": 2, "microbatches": 2}
    straight, _, going_on = summaries(
        2, [run | {"steps": 4, "checkpoint": None}, run | {"steps": 2}, run | {"steps": 4, "resume": True}]
    )
    assert going_on["steps"] == 2
    for what in ("last_loss", "validation_loss", "replica_digest"):
        assert going_on[what] == straight[what]


def test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was():
    stages, shards = {"pipeline": 2, "microbatches": 2}, {"tensor": 2}
    [alone] = summaries(1, [{"model": "mlp", "steps": 4}])
    with tempfile.TemporaryDirectory() as folder:
        run = {"model": "mlp", "checkpoint": folder}
        first = run | stages | {"steps": 2}
        _, going_on = summaries(2, [first, run | shards | {"steps": 4, "resume": True}])
    for what in ("last_loss", "validation_loss"):
        assert going_on[what] == pytest.approx(alone[what], rel=1e-5)
