"""Sequences that are cut, and experts that are divided, equal one process beside each other axis."""

import pytest

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import batch, compare, gpt

MOE = Experts(MoEConfig(4, 2), aux_weight=0.3, seed=7)


def check(*every: Sizes, experts: Experts | None = None, **changes: object) -> None:
    """Compare each with one process; all have the same number of ranks."""
    [world_size] = {sizes.world_size for sizes in every}

    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes, experts, **changes)

    run_ranks(work, world_size)


def test_sequences_cut_on_two_ranks_equal_one_process():
    check(
        Sizes(context=2, microbatches=2),
        Sizes(context=2, attention="all_to_all", microbatches=2),
        Sizes(context=2, recompute=True),
        Sizes(context=2, attention="all_to_all", recompute=True),
        Sizes(context=2, zero=1),
        Sizes(context=2, zero=2, microbatches=2),
        Sizes(context=2, zero=3),
    )


def test_sequences_cut_on_three_ranks_equal_one_process():
    check(Sizes(context=3), Sizes(context=3, attention="all_to_all"), num_heads=6, num_kv_heads=3, width=12)


def test_cut_sequences_beside_replicas_equal_one_process():
    check(
        Sizes(data=2, context=2, microbatches=2),
        Sizes(data=2, context=2, attention="all_to_all", zero=1),
        Sizes(data=2, context=2, zero=3, microbatches=2),
    )


def test_cut_sequences_beside_divided_layers_equal_one_process():
    check(
        Sizes(context=2, tensor=2, microbatches=2),
        Sizes(context=2, tensor=2, attention="all_to_all"),
        Sizes(context=2, tensor=2, sequence_parallel=True),
        Sizes(context=2, tensor=2, sequence_parallel=True, zero=2),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_cut_sequences_in_pipelines_equal_one_process(schedule):
    check(
        Sizes(pipeline=2, context=2, microbatches=4, schedule=schedule),
        Sizes(pipeline=2, context=2, microbatches=4, schedule=schedule, attention="all_to_all"),
    )


def test_experts_divided_among_replicas_equal_one_process():
    check(
        Sizes(data=2, expert_ranks=2, microbatches=2),
        Sizes(data=2, expert_ranks=2, recompute=True, microbatches=2),
        Sizes(data=2, microbatches=2),
        Sizes(data=2, zero=1),
        experts=MOE,
        num_layers=2,
    )


def test_replicas_of_divided_experts_equal_one_process():
    check(
        Sizes(data=4, expert_ranks=2),
        Sizes(data=4, expert_ranks=4),
        Sizes(data=4, zero=3),
        experts=MOE,
        num_layers=2,
    )


def test_experts_beside_divided_layers_equal_one_process():
    check(
        Sizes(data=2, tensor=2, expert_ranks=2, microbatches=2),
        Sizes(data=2, tensor=2, expert_ranks=2, microbatches=2, recompute=True),
        experts=MOE,
        num_layers=2,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_experts_in_pipelines_equal_one_process(schedule):
    check(
        Sizes(pipeline=2, data=2, expert_ranks=2, microbatches=4, schedule=schedule),
        experts=MOE,
        num_layers=4,
    )


def test_experts_of_cut_sequences_equal_one_process():
    check(
        Sizes(data=2, context=2, expert_ranks=2, microbatches=2),
        Sizes(data=2, context=2, expert_ranks=4, attention="all_to_all"),
        experts=MOE,
        num_layers=2,
    )


def test_dropped_tokens_are_those_of_one_process_with_the_same_capacity():
    check(
        Sizes(data=2, expert_ranks=2, microbatches=2),
        experts=Experts(MoEConfig(4, 2, capacity=0.8), aux_weight=0.3),
        num_layers=2,
    )


def test_all_axes_on_eight_ranks_equal_one_process():
    check(
        Sizes(pipeline=2, context=2, tensor=2, expert_ranks=2, microbatches=2),
        Sizes(pipeline=2, data=2, context=2, expert_ranks=4, microbatches=2, recompute=True),
        experts=MOE,
        num_layers=2,
    )


def test_sequences_of_another_length_than_the_example_are_refused():
    def refused(cluster: Cluster) -> str:
        hybrid = HybridParallel(gpt(), Mesh(cluster, Sizes(context=2)), batch(2)[0])
        with pytest.raises(WorkbookError) as error:
            hybrid.own_tokens(batch(2)[0][:, :8])
        return str(error.value)

    assert run_ranks(refused, 2)[0].startswith("The sequences have 8 tokens, and were cut for 12")
