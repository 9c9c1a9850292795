"""A pipeline trains as one process does, with every schedule, model and number of microbatches."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from pipeline_parallel.actions import Table
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, one_f_one_b, stages_per_rank, table_of, zb_h1
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    RTOL,
    cnn,
    compare_schedule,
    compare_with_one_process,
    gpt,
    gradients_of,
    images,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)
from tests.pipeline_parallel.test_simulate import any_table

# Fewer than ranks, as many, more, and numbers that ranks do not divide; for a full zb_v 2p-1 at least.
MICROBATCHES = {1: (1, 3), 2: (1, 2, 5), 3: (2, 4, 7), 4: (1, 3, 9)}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process_with_any_number_of_microbatches(n: int):
    def compare(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = n * stages_per_rank(name, chunks)
            for microbatches in MICROBATCHES[n]:
                layers = stages + microbatches % 3  # sometimes a layer for each stage, sometimes uneven
                compare_schedule(cluster, name, microbatches, partial(mlp, layers), vectors, chunks)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process_for_a_gpt_tied_and_untied(n: int):
    def work(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = n * stages_per_rank(name, chunks)
            if stages > 9:
                continue  # as many layers say nothing new
            compare = partial(compare_schedule, cluster, name, n + 1, batch_of=text, chunks=chunks, rows=1)
            compare(make=partial(gpt, num_layers=max(1, stages - 1)))  # the embedding or the head alone
            if stages <= 2 * n:
                compare(make=partial(gpt, tied=False, num_layers=stages + 1), steps=1)

    run_ranks(work, n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_images_go_from_stage_to_stage_in_any_shape(n: int):
    def compare(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            if n * stages_per_rank(name, chunks) <= 4:
                compare_schedule(cluster, name, n + 1, cnn, images, chunks, steps=1)

    run_ranks(compare, n)


def test_any_table_that_is_valid_trains_as_one_process_does():
    """Stages are anywhere, actions in any valid order, and full backwards stand beside halves."""
    tables = [any_table(3, stages, 4, seed) for seed, stages in enumerate([3, 5, 6, 3, 7, 4, 9, 6])]

    def compare(cluster: Cluster, tables: list[Table]) -> None:
        for seed, table in enumerate(tables):
            compare_with_one_process(cluster, partial(mlp, 9), table, vectors(8), what=f" any_table {seed}")

    run_ranks(compare, 3, tables)


def test_a_cut_by_costs_changes_nothing():
    def compare(cluster: Cluster) -> None:
        for costs in ([9.0, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 9], [0.0, 0, 0, 0, 0, 0]):
            make = partial(gpt, num_layers=4)
            compare_with_one_process(cluster, make, one_f_one_b(3, 2), text(2), costs=costs, what=f" {costs}")

    run_ranks(compare, 3)


def test_a_tied_copy_starts_as_the_first_stage_has_it_and_both_stay_equal():
    def compare(cluster: Cluster) -> None:
        def spoil(model: nn.Module) -> None:
            if cluster.rank > 0:
                model.head.weight.data.normal_()

        for name, chunks in ALL_SCHEDULES:
            make = partial(gpt, num_layers=3 * stages_per_rank(name, chunks) - 1)
            compare_schedule(cluster, name, 2, make, text, chunks, spoil=spoil, rows=1, steps=1)

    run_ranks(compare, 3)


def twice_tied() -> MLP:
    model = MLP([6] * 5).double()
    model.layers[2].weight, model.layers[3].weight = model.layers[0].weight, model.layers[1].weight
    return model


def test_several_pairs_of_stages_may_share_weights():
    def compare(cluster: Cluster) -> None:
        def spoil(model: nn.Module) -> None:
            if cluster.rank >= 2:
                model.layers[2].weight.data.normal_()
                model.layers[3].weight.data.normal_()

        for name in ("gpipe", "1f1b", "zb_h1"):
            compare_schedule(cluster, name, 3, twice_tied, partial(vectors, width=6), spoil=spoil)

    run_ranks(compare, 4, timeout=20)


def frozen(*names: str, **sizes) -> nn.Module:
    """Make a GPT in which parameters whose names begin with `names` are frozen, and one is never used."""
    model = gpt(num_layers=5, **sizes)
    model.blocks[1].never_used = nn.Linear(3, 3).double()
    with torch.no_grad():
        for parameter in model.blocks[1].never_used.parameters():
            parameter.fill_(1.0)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(names))
    return model


FIRST_STAGE = ("token_embedding", "position_embedding", "blocks.0", "blocks.1")


def test_what_is_frozen_or_unused_has_no_gradient_and_the_others_have_theirs():
    cases = [
        ((), True),
        (("blocks.0.attention.q_proj", "blocks.3.mlp.up_proj.weight", "final_norm.bias"), True),
        (("blocks.2.mlp.down_proj.bias", "blocks.4", "position_embedding"), True),
        (FIRST_STAGE, False),
        (("blocks.2", "blocks.3"), True),  # a stage in the middle
        (("final_norm", "head", "blocks.4"), False),
        (("token_embedding",), True),  # and so the head
    ]

    def compare(cluster: Cluster) -> None:
        for names, tied in cases:
            for name, recompute in (("1f1b", False), ("zb_h1", True)):
                make = partial(frozen, *names, tied=tied)
                options = {"rows": 1, "steps": 1, "recompute": recompute, "what": f" {names} frozen"}
                compare_schedule(cluster, name, 2, make, text, **options)

    run_ranks(compare, 3)


def test_recomputing_all_stages_or_some_changes_no_gradient():
    def compare(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = 3 * stages_per_rank(name, chunks)
            for recompute in (True, [1, stages - 1]):
                compare_schedule(
                    cluster, name, 2, partial(mlp, stages + 1), vectors, chunks, recompute=recompute, steps=1
                )
            if stages <= 6:
                make = partial(gpt, num_layers=stages - 1)
                compare_schedule(cluster, name, 2, make, text, chunks, rows=1, recompute=True, steps=1)

    run_ranks(compare, 3)


def one_step(table: Table, model: nn.Module, batch, **options) -> Pipeline:
    x, y = batch
    pipeline = Pipeline(model, table, loss_of, x[:1], **options)
    torch.manual_seed(pipeline.rank)
    pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    return pipeline


def test_a_recomputed_forward_drops_out_what_the_first_one_did():
    def compare(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = 2 * stages_per_rank(name, chunks)
            table, batch = table_of(name, 2, 3, chunks), text(3)
            make = partial(gpt, num_layers=stages - 1, dropout=0.4)
            kept = own_gradients(one_step(table, make(), batch))
            recompute = [stages - 1] if name == "gpipe" else True
            again = own_gradients(one_step(table, make(), batch, recompute=recompute))
            assert_same(again, kept, RTOL, f"gradient, {name}, recompute={recompute},")
        without = own_gradients(one_step(table, make().eval(), batch))
        with pytest.raises(AssertionError):
            assert_same(kept, without, 1e-3)

    run_ranks(compare, 2)


def test_the_masks_of_a_pipeline_of_one_rank_are_those_of_a_loop_over_microbatches():
    def compare(cluster: Cluster) -> None:
        x, y = text(3)
        reference = gpt(dropout=0.4)
        torch.manual_seed(0)
        for i in range(3):
            (loss_of(reference(x[i : i + 1]), y[i : i + 1]) / 3).backward()
        for schedule in (gpipe, one_f_one_b, zb_h1):
            for recompute in (False, True):
                mine = own_gradients(one_step(schedule(1, 3), gpt(dropout=0.4), (x, y), recompute=recompute))
                what = f"gradient, {schedule.__name__}, recompute={recompute},"
                assert_same(mine, only(gradients_of(reference), mine), RTOL, what)

    run_ranks(compare, 1)


def test_gradients_of_several_steps_add_up_until_they_are_cleared():
    def compare(cluster: Cluster) -> None:
        for name in ("1f1b", "zb_h1", "zb_v"):
            reference = gpt(tied=False, num_layers=4)
            x, y = text(4)
            pipeline = Pipeline(gpt(tied=False, num_layers=4), table_of(name, 2, 2), loss_of, x[:2])
            for _ in range(3):
                loss_of(reference(x), y).backward()
                pipeline.step(x, y)
            mine = own_gradients(pipeline)
            assert_same(mine, only(gradients_of(reference), mine), RTOL, f"gradient, {name},")

    run_ranks(compare, 2)


def test_two_pipelines_train_side_by_side_in_groups_of_their_own():
    def compare(cluster: Cluster) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rows = 4 if cluster.rank % 2 else 6
        for name in ("1f1b", "zb_v"):
            table = table_of(name, 2, 2)
            compare_with_one_process(
                cluster, partial(gpt, num_layers=4), table, text(rows), group=groups[cluster.rank % 2]
            )

    run_ranks(compare, 4)


def test_the_state_of_the_full_model_goes_from_one_schedule_to_another_and_to_one_process():
    def compare(cluster: Cluster) -> None:
        x, y = text(4)
        trained = gpt(num_layers=4)
        loss_of(trained(x), y).backward()
        torch.optim.SGD(trained.parameters(), lr=0.3).step()
        state = trained.state_dict()
        for name, chunks in (("1f1b", 1), ("interleaved", 3), ("zb_v", 2)):
            pipeline = Pipeline(gpt(num_layers=4), table_of(name, 2, 2, chunks), loss_of, x[:2])
            pipeline.load_full_state_dict(state)
            state = pipeline.full_state_dict()
            assert list(state) == list(trained.state_dict())
            assert_same(state, trained.state_dict(), 0, f"tensor of the state, {name},")
            loss = pipeline.step(x, y).loss
            if loss is not None:
                expected = loss_of(trained(x), y).detach()
                assert_same({"loss": loss}, {"loss": expected}, RTOL, f"loss, {name},")
        single = gpt(num_layers=4)
        single.load_state_dict(state)
        assert_same(dict(single.named_parameters()), dict(trained.named_parameters()), 0)

    run_ranks(compare, 2)
