"""The groups of a mesh, its picture, and the sizes that make no sense."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from comm.collectives import all_reduce
from comm.errors import CommError, LostRank
from expert_parallel.config import form_groups
from hybrid_parallel.mesh import AXES, Mesh, coordinates_of, drawn_mesh, groups_of, replicas_of, stream_of
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from lab.ranks import run_ranks
from lab.replace import replaced
from tests.hybrid_parallel.equivalence import gpt
from tests.on_ranks import on_ranks
from tests.refusals import refusal

GPT = GPTConfig(num_layers=8, num_heads=6, width=24)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_ranks_along_data_and_context_are_replicas_which_share_experts_and_hold_the_same_ones():
    def own(cluster: Cluster) -> list[list[int]]:
        mesh = Mesh(cluster, ParallelSizes(pipeline=2, data=2, context=2, expert_ranks=2))
        experts = mesh.form_expert_groups()
        assert ranks_of(experts.everyone) == ranks_of(mesh.replicas)
        return [ranks_of(group) for group in (mesh.replicas, experts.experts, experts.replicas)]

    found = run_ranks(own, 8)
    assert found[:2] == [[[0, 1, 2, 3], [0, 1], [0, 2]], [[0, 1, 2, 3], [0, 1], [1, 3]]]
    assert found[6:] == [[[4, 5, 6, 7], [6, 7], [4, 6]], [[4, 5, 6, 7], [6, 7], [5, 7]]]


def test_neighbours_are_in_one_tensor_group_and_stages_are_the_farthest_apart():
    sizes = ParallelSizes(pipeline=2, data=3, context=2, tensor=2)
    assert groups_of("tensor", sizes)[:3] == [[0, 1], [2, 3], [4, 5]]
    assert groups_of("context", sizes)[:3] == [[0, 2], [1, 3], [4, 6]]
    assert groups_of("data", sizes)[:2] == [[0, 4, 8], [1, 5, 9]]
    assert groups_of("pipeline", sizes)[:2] == [[0, 12], [1, 13]]
    assert replicas_of(sizes)[:2] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert coordinates_of(23, sizes) == {"pipeline": 1, "data": 2, "context": 1, "tensor": 1}


@pytest.mark.parametrize("axis", AXES)
def test_each_rank_is_in_one_group_of_an_axis_at_its_place(axis: str):
    sizes = ParallelSizes(pipeline=3, data=2, context=4, tensor=5)
    groups = groups_of(axis, sizes)
    assert sorted(rank for group in groups for rank in group) == list(range(120))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        places = [coordinates_of(rank, sizes) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(getattr(sizes, axis)))
        assert all(place == places[0] for place in places)


def test_a_rank_gives_up_in_any_group_after_the_jobs_timeout():
    """A group of the user's own, and what torch itself sends, must not wait torch's 30 minutes either."""

    def work(cluster: Cluster) -> None:
        groups = {
            "tensor axis": Mesh(cluster, ParallelSizes(tensor=2)).tensor,
            "experts": form_groups(2).experts,
            "the user's own": dist.new_group([0, 1]),
        }
        if cluster.rank == 1:
            while not has_given_up.exists():
                time.sleep(0.05)
            return
        for name, group in groups.items():
            with contextlib.suppress(CommError):
                all_reduce(torch.ones(3), group=group)
                raise AssertionError(f"{name}: rank 0 did not give up")
        has_given_up.touch()

    with TemporaryDirectory() as folder:
        has_given_up = Path(folder) / "has given up"
        run_ranks(work, 2, timeout=10, group_timeout=0.5)


@on_ranks(1)
def test_a_group_that_does_not_form_in_time_is_refused_in_a_sentence(cluster):
    def times_out(*args, **options):
        raise RuntimeError("Wait timeout")  # as gloo says it

    sentence = "^cannot form the groups of the mesh: another rank has not answered in time$"
    with (
        replaced("torch.distributed.new_subgroups_by_enumeration", times_out),
        pytest.raises(LostRank, match=sentence),
    ):
        Mesh(cluster, ParallelSizes())


@on_ranks(8)
def test_torchs_own_device_mesh_has_the_same_groups(cluster):
    sizes = ParallelSizes(pipeline=2, data=1, context=2, tensor=2)
    mesh, theirs = Mesh(cluster, sizes), init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=AXES)
    for axis in AXES:
        assert ranks_of(mesh.group(axis)) == ranks_of(theirs.get_group(axis))
        assert mesh.coordinate(axis) == theirs.get_local_rank(axis)


def test_replicas_and_stages_draw_masks_of_their_own():
    streams = [stream_of(rank, ParallelSizes(pipeline=2, data=2, tensor=2)) for rank in range(8)]
    assert streams == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_picture_has_every_rank_at_its_coordinates():
    assert drawn_mesh(ParallelSizes(pipeline=2, data=2, tensor=2)).splitlines() == [
        "8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)",
        "",
        "         stage 0                  stage 1",
        "         tensor 0   tensor 1      tensor 0   tensor 1",
        "data 0   rank 0     rank 1        rank 4     rank 5",
        "data 1   rank 2     rank 3        rank 6     rank 7",
    ]
    assert drawn_mesh(ParallelSizes(pipeline=2, data=2, context=2)).splitlines()[2:] == [
        "                    stage 0       stage 1",
        "                    tensor 0      tensor 0",
        "data 0, context 0   rank 0        rank 4",
        "data 0, context 1   rank 1        rank 5",
        "data 1, context 0   rank 2        rank 6",
        "data 1, context 1   rank 3        rank 7",
    ]


REFUSED = [
    ({"data": 3}, "3 ranks = .* but there are 4 ranks: the product of the axes must be 4"),
    ({"data": 0}, "data is 0; it must be at least 1"),
    ({"pipeline": 2, "data": 2, "zero": 2}, "zero is 2 beside a pipeline"),
    (
        {"pipeline": 4, "schedule": "zb_v", "recompute": True},
        "recompute is not offered beside zb_v",
    ),
    ({"data": 4, "sequence_parallel": True}, "sequence_parallel divides tokens"),
    ({"pipeline": 4, "schedule": "interleaved", "chunks": 3}, "12 stages need at least as many layers"),
    ({"data": 4, "microbatches": 5}, "take a multiple of 20"),
    ({"tensor": 4}, "tensor is 4; it must divide the model's 6 query heads"),
    ({"context": 4, "attention": "all_to_all"}, "context is 4; it must divide the 6 key and value heads"),
    (
        {"context": 2, "tensor": 2, "attention": "all_to_all"},
        "context is 2; it must divide the 3 key and value heads that a rank of the tensor axis has",
    ),
    ({"data": 4, "sync_every": 0}, "sync_every is 0; it must be at least 1"),
    ({"data": 4, "compress": "int8", "sync_every": 8}, "compress is int8 and sync_every is 8: both make"),
    ({"data": 4, "compress": "int8", "zero": 1}, "compress is int8 and zero is 1: the two are not offered"),
    ({"data": 2, "context": 2, "sync_every": 8}, "sync_every is 8 and context is 2: the two are not"),
    ({"data": 2, "pipeline": 2, "compress": "topk"}, "compress is topk and pipeline is 2: stages would"),
    (
        {"pipeline": 4, "sync_every": 8},
        "sync_every is 8, and the data axis has one rank, which",
    ),
]
REFUSED_LENGTH = [
    {"data": 2, "context": 2},
    {"context": 4, "attention": "all_to_all"},
    {"context": 2, "tensor": 2, "attention": "all_to_all", "sequence_parallel": True},
]
REFUSED_EXPERTS = [
    ({"data": 4, "expert_ranks": 2}, 1, "expert_ranks is 2, and the model has no experts"),
    ({"data": 4, "expert_ranks": 2}, 3, "expert_ranks is 2; it must divide the 3 experts"),
    ({"data": 2, "tensor": 2, "expert_ranks": 4}, 4, "it must divide the 2 replicas, which are data x"),
    ({"data": 4, "expert_ranks": 2, "zero": 1}, 4, "zero is 1 and expert_ranks is 2: the two"),
    ({"data": 2, "tensor": 2, "sequence_parallel": True}, 4, "and experts need all of them"),
    ({"data": 4, "sync_every": 8}, 4, "sync_every is 8 and experts is 4: the two are not offered together"),
]
REFUSED_FOR_AN_MLP = [
    ({"data": 2, "context": 2}, 1, "context is 2, and an MLP has no sequences to cut"),
    ({"data": 4}, 4, "experts is 4, and an MLP has no blocks to put them in; take a gpt."),
    ({"data": 2, "tensor": 2, "sequence_parallel": True}, 1, "an MLP has none; leave it out."),
    ({"data": 4, "recompute": True}, 1, "recompute would save no memory"),
]


@pytest.mark.parametrize(
    ("config", "sizes", "experts", "sentence"),
    [
        *((GPT, sizes, 1, sentence) for sizes, sentence in REFUSED),
        *((replace(GPT, block_size=126), sizes, 1, "sequences have 126 tokens") for sizes in REFUSED_LENGTH),
        (replace(GPT, dropout=0.1), {"data": 2, "context": 2}, 1, "attention is ring, which cannot drop"),
        *((GPT, *refused) for refused in REFUSED_EXPERTS),
        *((MLPConfig(8, 32), *refused) for refused in REFUSED_FOR_AN_MLP),
    ],
)
def test_sizes_that_make_no_sense_are_refused_in_a_sentence(
    config: GPTConfig | MLPConfig, sizes: dict[str, Any], experts: int, sentence: str
):
    with pytest.raises(WorkbookError, match=sentence):
        refuse_sizes(ParallelSizes(**sizes), config, 24, 4, experts)


@on_ranks(2)
def test_a_mesh_that_does_not_fit_the_model_is_refused_without_refuse_sizes(cluster: Cluster):
    mesh, x = Mesh(cluster, ParallelSizes(pipeline=2)), torch.zeros(2, 12, dtype=torch.long)
    sentence = refusal(put_on_mesh, gpt(num_layers=1), mesh, x, torch.optim.SGD)
    assert sentence == "2 stages need at least as many layers, and the model has 1."
