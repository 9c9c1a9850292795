"""A GPT or an MLP on a mesh trains as on one process: gradients, their norm, parameters, in float64.

Each comparison also refuses a rank that sends other bytes along an axis than the formulas say.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import batch, compare, gpt
from tests.on_ranks import on_ranks
from tests.refusals import refusal
from training.clipping import clip_grad_norm_

MOE = Experts(MoEConfig(4, 2), aux_weight=0.3, seed=7)
MLP = {"mlp": (6, 8, 4, 4, 12, 6)}  # the last layer is divided by its outputs


def check(*every: Sizes, experts: Experts | None = None, **changes: Any) -> None:
    """Compare each with one process; all have the same number of ranks."""
    [world_size] = {sizes.world_size for sizes in every}

    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes, experts, **changes)

    run_ranks(work, world_size)


def test_one_axis_alone_equals_one_process():
    check(Sizes(microbatches=3))
    check(
        Sizes(data=2, zero=1, recompute=True),
        Sizes(data=2, zero=3, microbatches=2),
        Sizes(tensor=2, sequence_parallel=True, recompute=True),
        Sizes(pipeline=2, microbatches=2, recompute=True),
        Sizes(context=2, zero=3, recompute=True),
        Sizes(context=2, attention="all_to_all", microbatches=2, recompute=True),
    )


def test_pipelines_of_replicas_equal_one_process():
    check(
        Sizes(pipeline=2, data=2, microbatches=4, schedule="zb_h1", pattern="ring"),
        Sizes(pipeline=2, data=2, microbatches=2, zero=1, recompute=True),
    )


# The four tests below have divided layers beside every way to divide the replicas' work.
def test_replicas_of_divided_layers_equal_one_process():
    check(Sizes(data=2, tensor=2, microbatches=2))


def test_divided_layers_in_shards_of_zero_3_equal_one_process():
    check(Sizes(data=2, tensor=2, zero=3, recompute=True))


def test_replicas_of_divided_tokens_equal_one_process():
    check(
        Sizes(data=2, tensor=2, sequence_parallel=True, microbatches=2),
        Sizes(data=2, tensor=2, sequence_parallel=True, zero=1),
    )


def test_divided_tokens_and_gradients_in_shards_equal_one_process():
    check(
        Sizes(data=2, tensor=2, sequence_parallel=True, zero=2, microbatches=2),
        Sizes(data=2, tensor=2, sequence_parallel=True, zero=3, microbatches=2),
    )


def test_pipelines_of_divided_layers_equal_one_process():
    check(Sizes(pipeline=2, tensor=2, microbatches=2, schedule="gpipe"))


def test_cut_sequences_beside_replicas_equal_one_process():
    check(
        Sizes(data=2, context=2, attention="all_to_all", zero=1),
        Sizes(data=2, context=2, zero=3, microbatches=2),
    )


def test_cut_sequences_beside_divided_layers_equal_one_process():
    check(
        Sizes(context=2, tensor=2, microbatches=2),
        Sizes(context=2, tensor=2, attention="all_to_all", sequence_parallel=True, zero=2),
    )


# Two stages a rank. The tests above have ZB-H1 beside replicas and GPipe beside divided layers.
def test_schedules_of_several_stages_a_rank_beside_other_axes_equal_one_process():
    check(
        Sizes(pipeline=2, context=2, microbatches=4, schedule="interleaved"),
        Sizes(pipeline=2, data=2, microbatches=4, schedule="zb_v"),
        Sizes(pipeline=2, tensor=2, microbatches=4, schedule="zb_v", sequence_parallel=True),
        Sizes(pipeline=2, data=2, microbatches=4, schedule="dualpipe_v"),
        Sizes(pipeline=2, context=2, microbatches=4, schedule="dualpipe_v", attention="all_to_all"),
    )


def test_experts_in_pipelines_equal_one_process():
    check(Sizes(pipeline=2, data=2, expert_ranks=2, microbatches=4, schedule="zb_v"), experts=MOE)


def test_a_tied_embedding_gets_the_sum_of_both_stages():
    check(Sizes(pipeline=2, data=2, microbatches=2))


def test_experts_divided_among_replicas_equal_one_process():
    check(
        Sizes(data=2, expert_ranks=2, recompute=True, microbatches=2),
        Sizes(data=2, zero=1),
        Sizes(data=2, zero=3),
        experts=MOE,
    )


def test_divided_experts_beside_replicas_divided_layers_and_cut_sequences_equal_one_process():
    check(
        Sizes(data=4, expert_ranks=2),
        Sizes(data=2, tensor=2, expert_ranks=2, microbatches=2, recompute=True),
        Sizes(data=2, context=2, expert_ranks=2, attention="all_to_all"),
        experts=MOE,
    )


def test_dropped_tokens_are_those_of_one_process_with_the_same_capacity():
    experts = Experts(MoEConfig(4, 2, capacity=0.8), aux_weight=0.3)
    check(Sizes(data=2, expert_ranks=2, microbatches=2), experts=experts)


def test_all_axes_on_eight_ranks_equal_one_process():
    check(
        Sizes(pipeline=2, data=2, tensor=2, microbatches=2, sequence_parallel=True, zero=1),
        tied=False,
    )
    check(
        Sizes(pipeline=2, data=2, context=2, expert_ranks=4, microbatches=2, recompute=True),
        experts=MOE,
    )


def test_odd_sizes_of_axes_equal_one_process():
    check(
        Sizes(pipeline=3, microbatches=3),
        Sizes(data=3, microbatches=2, zero=1),
        Sizes(tensor=3, microbatches=2),
        Sizes(context=3),
        num_layers=4,  # which three stages share unequally
        num_heads=6,
        num_kv_heads=3,
        width=12,
    )


def test_an_mlp_on_every_pair_of_axes():
    check(
        Sizes(pipeline=2, data=2, zero=1, microbatches=4, schedule="zb_v"),
        Sizes(pipeline=2, tensor=2, microbatches=4, schedule="interleaved", recompute=True),
        Sizes(data=2, tensor=2, zero=3, microbatches=2),
        **MLP,
    )


def test_the_norm_of_a_rank_without_gradients_is_that_of_all():
    def work(cluster: Cluster) -> tuple[float, bool]:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0]) if cluster.rank == 0 else None
        norm = clip_grad_norm_([parameter], 1.0, [None])
        return norm.item(), norm.dtype == torch.float64

    assert run_ranks(work, 2) == [(5.0, True), (5.0, True)]


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
@on_ranks(2)
def test_complex_gradients_are_clipped_by_their_absolute_values(cluster: Cluster, norm_type: float):
    values = torch.tensor([[3 + 4j, -1j], [2, 1 - 1j]], dtype=torch.complex128)
    full, shard = nn.Parameter(torch.zeros_like(values)), nn.Parameter(torch.zeros_like(values[0]))
    full.grad, shard.grad = values.clone(), values[cluster.rank].clone()
    expected = nn.utils.clip_grad_norm_(full, 0.5, norm_type)
    found = {"norm": clip_grad_norm_([shard], 0.5, [None], norm_type), "gradient": shard.grad}
    assert_same(found, {"norm": expected, "gradient": full.grad[cluster.rank]})


@on_ranks(2)
def test_a_norm_without_a_power_is_refused(cluster: Cluster):
    for norm_type in (0, -1, -math.inf, math.nan):
        sentence = refusal(clip_grad_norm_, [nn.Parameter(torch.zeros(1))], 1.0, [None], norm_type)
        assert sentence == f"norm_type {norm_type:g}: a norm has a power above 0, such as 2, or inf."


@on_ranks(2)
def test_a_second_backward_before_zero_grad_and_sequences_of_another_length_are_refused(cluster: Cluster):
    x, y = batch(2)
    for sizes in (Sizes(data=2), Sizes(data=2, zero=1), Sizes(data=2, zero=3)):
        hybrid = put_on_mesh(gpt(), Mesh(cluster, sizes), x, torch.optim.SGD, lr=0.1)
        hybrid.backward(x, y)
        with pytest.raises(WorkbookError, match=r"call optimizer\.zero_grad\(\) first"):
            hybrid.backward(x, y)
        hybrid.optimizer.zero_grad()
        hybrid.backward(x, y)
    hybrid = put_on_mesh(gpt(), Mesh(cluster, Sizes(context=2)), x)
    with pytest.raises(WorkbookError, match="The sequences have 8 tokens, and were cut for 12"):
        hybrid.own_tokens(x[:, :8])
