"""A GPT or an MLP on a mesh trains as on one process: gradients, their norm, parameters, in float64."""

import pytest
import torch

from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from pipeline_parallel.schedules import SCHEDULES
from tests.hybrid_parallel.equivalence import TIME, batch, compare, gpt


def check(*every: Sizes, **changes: object) -> None:
    """Compare each with one process; all have the same number of ranks."""
    [world_size] = {sizes.world_size for sizes in every}

    def work(cluster: Cluster) -> None:
        for sizes in every:
            compare(cluster, sizes, **changes)

    run_ranks(work, world_size)


def test_one_axis_alone_equals_one_process():
    check(
        Sizes(data=2, microbatches=2),
        Sizes(data=2, zero=1),
        Sizes(data=2, zero=2, microbatches=3),
        Sizes(data=2, zero=3, microbatches=2),
        Sizes(data=2, recompute=True),
        Sizes(tensor=2, microbatches=2),
        Sizes(tensor=2, sequence_parallel=True),
        Sizes(tensor=2, recompute=True),
        Sizes(pipeline=2, microbatches=2),
        Sizes(pipeline=2, microbatches=2, recompute=True),
    )


def test_one_rank_alone_equals_one_process():
    check(Sizes(), Sizes(microbatches=3))


def test_pipelines_of_replicas_equal_one_process():
    check(
        Sizes(pipeline=2, data=2, microbatches=3),
        Sizes(pipeline=2, data=2, zero=1, microbatches=2),
        Sizes(pipeline=2, data=2, microbatches=2, recompute=True),
        Sizes(pipeline=2, data=2, microbatches=2, pattern="ring"),
    )


def test_replicas_of_divided_layers_equal_one_process():
    check(
        Sizes(data=2, tensor=2, microbatches=2),
        Sizes(data=2, tensor=2, zero=1, microbatches=2),
        Sizes(data=2, tensor=2, zero=2),
    )


def test_divided_layers_in_shards_of_zero_3_equal_one_process():
    check(
        Sizes(data=2, tensor=2, zero=3, microbatches=2),
        Sizes(data=2, tensor=2, zero=3, recompute=True),
    )


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
    check(
        Sizes(pipeline=2, tensor=2, microbatches=2),
        Sizes(pipeline=2, tensor=2, microbatches=2, sequence_parallel=True),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_beside_replicas_and_beside_divided_layers_equals_one_process(schedule):
    check(
        Sizes(pipeline=2, data=2, microbatches=4, schedule=schedule),
        Sizes(pipeline=2, tensor=2, microbatches=4, schedule=schedule, sequence_parallel=True),
    )


def test_a_tied_embedding_gets_the_sum_of_both_stages():
    check(Sizes(pipeline=2, data=2, microbatches=2))


@pytest.mark.parametrize("tied", [True, False])
def test_all_three_axes_on_eight_ranks_equal_one_process(tied):
    check(
        Sizes(pipeline=2, data=2, tensor=2, microbatches=2),
        Sizes(pipeline=2, data=2, tensor=2, microbatches=2, sequence_parallel=True, zero=1),
        tied=tied,
    )


def test_odd_sizes_of_axes_equal_one_process():
    check(Sizes(pipeline=3, data=2, microbatches=3), Sizes(pipeline=2, data=3, microbatches=2, zero=1))
    check(Sizes(data=2, tensor=3), Sizes(pipeline=2, tensor=3, microbatches=2), num_heads=6, width=12)


def test_a_rank_without_any_gradient_takes_part_in_clipping_on_the_device_of_the_others():
    def device(cluster: Cluster) -> str:
        # Each parameter is on the CPU, and the example alone says where the run computes.
        example = torch.zeros((1, TIME), dtype=torch.int64, device="meta")
        hybrid = HybridParallel(gpt(), Mesh(cluster, Sizes()), example)
        return hybrid.clip_grad_norm_(1.0).device.type

    assert run_ranks(device, 1) == ["meta"]


MLP = {"mlp": (6, 8, 4, 4, 12, 6)}  # the last layer is divided by its outputs


def test_an_mlp_on_each_axis_and_on_every_pair():
    check(
        Sizes(tensor=2, microbatches=2),
        Sizes(pipeline=2, microbatches=2),
        Sizes(pipeline=2, microbatches=2, recompute=True),
        Sizes(data=2, zero=3, microbatches=2),
        **MLP,
    )
    check(
        Sizes(pipeline=2, data=2, zero=1, microbatches=4, schedule="zb_v"),
        Sizes(pipeline=2, tensor=2, microbatches=4, schedule="interleaved"),
        Sizes(data=2, tensor=2, zero=2, microbatches=2),
        **MLP,
    )


def test_an_mlp_on_all_three_axes():
    check(Sizes(pipeline=2, data=2, tensor=2, microbatches=2, recompute=True), **MLP)


def test_a_second_backward_before_zero_grad_is_refused():
    def work(cluster: Cluster) -> None:
        for sizes in (Sizes(data=2), Sizes(data=2, zero=1), Sizes(data=2, zero=3), Sizes(tensor=2)):
            x, y = batch(2)
            hybrid = HybridParallel(gpt(), Mesh(cluster, sizes), x, torch.optim.SGD, lr=0.1)
            hybrid.backward(x, y)
            with pytest.raises(WorkbookError, match=r"call optimizer\.zero_grad\(\) first"):
                hybrid.backward(x, y)
            hybrid.optimizer.zero_grad()
            hybrid.backward(x, y)

    run_ranks(work, 2)
