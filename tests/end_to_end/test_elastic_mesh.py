"""Wherever a rank of a mesh dies, the survivors end where an undisturbed process ends: state and moments."""

from typing import Any

import pytest

from tests.hybrid_parallel.test_elastic_mesh import survivors_end_as_one_process


@pytest.mark.parametrize(
    "sizes",
    [
        {"zero": 1},
        {"pipeline": 2, "microbatches": 2},
        {"pipeline": 2, "tensor": 2, "microbatches": 2},
        {"tensor": 2, "zero": 2, "sequence_parallel": True},
        {"context": 2, "experts": 4, "expert_ranks": 4},
    ],
    ids=str,
)
def test_a_death_on_any_mesh_leaves_the_state_of_one_process(tmp_path, sizes: dict[str, Any]):
    survivors_end_as_one_process(tmp_path, {2}, kill=("2@3",), **sizes)


def test_one_rank_and_then_another_one_may_die(tmp_path):
    survivors_end_as_one_process(tmp_path, {1, 3}, kill=("1@3", "3@5"), zero=1)


@pytest.mark.parametrize("moment", ["form", "load", "save"])
def test_a_rank_may_die_while_it_meets_the_others_loads_or_saves(tmp_path, moment: str):
    kill = () if moment == "save" else ("2@3",)
    survivors_end_as_one_process(tmp_path, {1, *([2] if kill else [])}, moment, kill=kill)
