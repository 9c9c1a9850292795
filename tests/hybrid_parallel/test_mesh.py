"""The groups of a mesh, its picture, and the sizes that make no sense."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hybrid_parallel.mesh import AXES, Mesh, coordinates_of, drawn, groups_of
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.errors import WorkbookError
from lab.model import GPTConfig
from lab.ranks import run_ranks


def test_ranks_that_differ_in_one_coordinate_form_a_group_and_neighbours_divide_a_layer():
    def groups(cluster):
        mesh = Mesh(cluster, ParallelSizes(pipeline=2, data=2, tensor=2))
        return {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES}

    of_rank = run_ranks(groups, 8)
    assert of_rank[0] == {"pipeline": [0, 4], "data": [0, 2], "tensor": [0, 1]}
    assert of_rank[7] == {"pipeline": [3, 7], "data": [5, 7], "tensor": [6, 7]}


def test_neighbours_are_in_one_tensor_group_and_stages_are_the_farthest_apart():
    sizes = ParallelSizes(pipeline=2, data=3, tensor=4)
    assert groups_of("tensor", sizes)[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of("data", sizes)[:2] == [[0, 4, 8], [1, 5, 9]]
    assert groups_of("pipeline", sizes)[:2] == [[0, 12], [1, 13]]
    assert coordinates_of(23, sizes) == {"pipeline": 1, "data": 2, "tensor": 3}


@pytest.mark.parametrize("axis", AXES)
def test_each_rank_is_in_one_group_of_an_axis_at_its_place(axis: str):
    sizes = ParallelSizes(pipeline=3, data=2, tensor=5)
    groups = groups_of(axis, sizes)
    assert sorted(rank for group in groups for rank in group) == list(range(30))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        places = [coordinates_of(rank, sizes) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(getattr(sizes, axis)))
        assert all(place == places[0] for place in places)


def test_torchs_own_device_mesh_has_the_same_groups():
    def same(cluster):
        sizes = ParallelSizes(pipeline=2, data=1, tensor=2)
        mesh, theirs = Mesh(cluster, sizes), init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
        for each in (mesh.device_mesh, theirs):
            for axis in AXES:
                ranks = dist.get_process_group_ranks(each.get_group(axis))
                assert ranks == dist.get_process_group_ranks(mesh.group(axis))
                assert each.get_local_rank(axis) == mesh.coordinate(axis)

    run_ranks(same, 4)


def test_the_picture_has_every_rank_at_its_coordinates():
    assert drawn(ParallelSizes(pipeline=2, data=2, tensor=2)).splitlines() == [
        "8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)",
        "",
        "            stage 0                  stage 1",
        "            tensor 0   tensor 1      tensor 0   tensor 1",
        "replica 0   rank 0     rank 1        rank 4     rank 5",
        "replica 1   rank 2     rank 3        rank 6     rank 7",
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ParallelSizes(data=3), "3 ranks = .* but there are 4"),
        (ParallelSizes(data=0), "data is 0"),
        (ParallelSizes(pipeline=2, data=2, zero=2), "zero is 2 beside a pipeline"),
        (ParallelSizes(data=4, sequence_parallel=True), "sequence_parallel divides tokens"),
        (
            ParallelSizes(pipeline=4, schedule="interleaved", chunks=3),
            "12 stages need at least as many layers",
        ),
        (ParallelSizes(data=4, microbatches=5), "take a multiple of 20"),
        (ParallelSizes(tensor=4), "tensor is 4; it must divide the model's 6 query heads"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_in_a_sentence(sizes: ParallelSizes, message: str):
    config = GPTConfig(num_layers=8, num_heads=6, width=24)
    with pytest.raises(WorkbookError, match=message):
        refuse_sizes(sizes, config, batch_size=24, world_size=4)
