"""What a rank holds around a step: shapes, tied parameters, evaluation, the full state, refusals."""

from functools import partial

import pytest
import torch
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP, loss_of
from lab.models.parts import parts_of
from lab.ranks import run_ranks
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import SCHEDULES, one_f_one_b, stages_per_rank, table_of
from pipeline_parallel.stage import Stage, balanced_stages
from pipeline_parallel.train_1f1b_by_hand import OneForwardOneBackward
from tests.pipeline_parallel.equivalence import gpt, mlp, text, vectors
from training.evaluation import evaluating


def sentence_of(call) -> str:
    with pytest.raises(WorkbookError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_evaluation_is_that_of_one_process_for_every_schedule_and_leaves_all_as_it_was():
    def work(cluster: Cluster) -> None:
        n = cluster.world_size
        for name in SCHEDULES:
            make = partial(gpt, num_layers=max(3, n * stages_per_rank(name)), dropout=0.4)
            (x, y), model = text(5), make()  # five rows: microbatches of two, two and one
            pipeline = Pipeline(make(), table_of(name, n, 3), loss_of, x[:2])
            pipeline.stages[next(iter(pipeline.stages))].eval()
            modes = [module.training for module in pipeline.modules()]
            state = torch.random.get_rng_state()
            with evaluating(pipeline):
                outputs = pipeline.forward_only(x)
                sums = pipeline.evaluation_sums(x, y, torch.tensor([True, False, True, True, False]))
            assert [module.training for module in pipeline.modules()] == modes
            assert torch.equal(torch.random.get_rng_state(), state)
            assert all(parameter.grad is None for parameter in pipeline.parameters())
            assert (outputs is None) == (sums is None) == (pipeline.rank_of[pipeline.last] != pipeline.rank)
            if outputs is not None:
                expected = model.eval()(x)
                torch.testing.assert_close(outputs, expected.detach(), rtol=1e-9, atol=1e-12)
                kept = [0, 2, 3]
                loss = loss_of(expected[kept].float(), y[kept]) * y[kept].numel()
                torch.testing.assert_close(sums[0], loss.double().detach(), rtol=1e-5, atol=0)

    run_ranks(work, 3)


def test_the_full_state_goes_from_one_schedule_to_another_and_to_one_process():
    def work(cluster: Cluster) -> None:
        x, _ = text(2)
        model = gpt(num_layers=6)
        first = Pipeline(model, table_of("zb_v", 2, 2), loss_of, x[:1])
        state = first.full_state_dict()
        assert_same(state, model.state_dict(), 0)
        other = gpt(num_layers=6)
        for parameter in other.parameters():
            parameter.data.zero_()
        second = Pipeline(other, table_of("interleaved", 2, 2), loss_of, x[:1])
        second.load_full_state_dict(state)
        assert_same(second.full_state_dict(), model.state_dict(), 0)
        optimizer = torch.optim.AdamW(second.parameters())
        names = {shard.name for shard in second.shards(optimizer)}
        assert "model/head.weight" not in names  # the tied weight goes by its first name, on both ranks
        assert "model/token_embedding.weight" in names

    run_ranks(work, 2)


def test_a_step_after_the_tied_gradients_were_added_up_is_refused():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        for make in (Pipeline, OneForwardOneBackward):
            model = gpt(num_layers=2)
            how = (model, one_f_one_b(2, 2)) if make is Pipeline else (balanced_stages(model, 2), 2)
            pipeline = make(*how, loss_of, x[:2])
            pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            assert "call zero_grad() first" in sentence_of(lambda pipeline=pipeline: pipeline.step(x, y))
            pipeline.zero_grad()
            pipeline.step(x, y)

    run_ranks(work, 2)


def test_what_does_not_fit_is_refused_in_a_sentence_on_all_ranks():
    def shared_by_three() -> nn.Module:
        model = MLP([4, 4, 4, 4])
        model.layers[1].weight = model.layers[2].weight = model.layers[0].weight
        return model

    def work(cluster: Cluster) -> list[str]:
        x, y = vectors(4)
        model, table = mlp(5), one_f_one_b(3, 2)
        pipeline = Pipeline(model, table, loss_of, x[:2])
        calls = [
            lambda: Pipeline(model, one_f_one_b(2, 2), loss_of, x),
            lambda: Pipeline(mlp(2), table, loss_of, x),
            lambda: Pipeline(nn.Linear(2, 2), table, loss_of, x),
            lambda: Pipeline(shared_by_three(), table, loss_of, torch.zeros(2, 4)),
            lambda: pipeline.step(x[:3], y[:3]),
        ]
        return [sentence_of(call) for call in calls]

    first, *others = run_ranks(work, 3)
    assert all(other == first for other in others)
    starts = (
        "The schedule is for 2 ranks, and there are 3.",
        "2 parts cannot be cut into 3 stages: take fewer ranks or --chunks, or more --layers.",
        "A Linear cannot be cut into stages: give an nn.Sequential",
        "Stages of three ranks share a parameter",
        "The pipeline was made for x and y of 4 rows, in 2 microbatches, and got 3 and 3",
    )
    for sentence, start in zip(first, starts, strict=True):
        assert sentence.startswith(start), sentence


def test_a_rank_without_parameters_is_refused_on_all_ranks():
    def work(cluster: Cluster) -> str:
        model = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
        stages = [Stage(nn.Sequential(*model), [part]) for part in parts_of(nn.Sequential(*model))]
        return sentence_of(lambda: OwnStages(stages, 2, nn.functional.mse_loss, torch.ones(2, 4)))

    assert set(run_ranks(work, 3)) == {"Rank 1 would have no parameters to train: cut fewer stages."}


def test_a_tied_weight_with_permuted_strides_trains_as_on_one_process():
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        first, middle, last = (nn.Linear(4, 4, bias=False).double() for _ in range(3))
        first.weight = last.weight = nn.Parameter(first.weight.detach().t())
        assert not first.weight.is_contiguous()
        return nn.Sequential(first, middle, last)

    def work(cluster: Cluster) -> None:
        x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        model = make()
        nn.functional.mse_loss(model(x), y).backward()
        pipeline = Pipeline(make(), one_f_one_b(2, 2), nn.functional.mse_loss, x[:2])
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        expected = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in pipeline.named_own_parameters().items():
            assert_same({name: parameter.grad}, {name: expected[name].grad})

    run_ranks(work, 2)
