"""What a user would do with a pipeline has the result of one process, or is refused in a sentence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, one_f_one_b, table_of
from tests.pipeline_parallel.equivalence import (
    RTOL,
    gpt,
    gradients_of,
    mlp,
    only,
    own_gradients,
    parameters_of,
    text,
    vectors,
)


def pipeline_of(model: nn.Module, x: Tensor, name: str = "1f1b", **options: Any) -> Pipeline:
    return Pipeline(model, table_of(name, 2, 2), loss_of, x[: len(x) // 2], **options)


def test_an_optimizer_made_before_and_what_is_frozen_unfrozen_or_assigned_later_is_as_on_one_process():
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name or "norm" in name)

    def freeze_the_first_stage(model: nn.Module) -> None:
        model.blocks[0].requires_grad_(False)
        model.token_embedding.requires_grad_(False)
        model.position_embedding.requires_grad_(False)

    def freeze_the_last_stage(model: nn.Module) -> None:
        model.blocks[1].requires_grad_(False)
        model.final_norm.requires_grad_(False)

    def unfreeze(model: nn.Module) -> None:
        model.requires_grad_(True)

    def assign(model: nn.Module) -> None:
        state = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def work(cluster: Cluster) -> None:
        x, y = text(4)
        changes = (freeze, freeze_the_first_stage, freeze_the_last_stage, unfreeze, assign)
        for change, name in [(change, name) for change in changes for name in ("1f1b", "zb_v")]:
            tied = change is not assign  # which gives embedding and head a tensor each
            plain, cut = (gpt(num_layers=4, tied=tied) for _ in range(2))
            for model in (plain, cut):
                model.blocks[2].requires_grad_(False)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (plain, cut)]
            pipeline = pipeline_of(cut, x, name)
            own = pipeline.named_own_parameters()
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(plain(x), y).backward()
                pipeline.step(x, y)
                pipeline.finish_gradient_sync()
                what = f"gradient, {change.__name__}, {name}, step {step},"
                assert_same(own_gradients(pipeline), only(gradients_of(plain), own), RTOL, what)
                for optimizer in optimizers:
                    optimizer.step()
                if step == 0:
                    for model in (plain, cut):
                        change(model)

    run_ranks(work, 2)


def test_clipping_takes_the_norm_of_the_full_model_in_which_a_tied_parameter_counts_once():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        for name, tied in (("1f1b", True), ("1f1b", False), ("zb_v", True), ("interleaved", True)):
            for clip in (1e-3, 1e3):
                make = partial(gpt, num_layers=4, tied=tied)
                plain, pipeline = make(), pipeline_of(make(), x, name)
                loss_of(plain(x), y).backward()
                expected = nn.utils.clip_grad_norm_(plain.parameters(), clip)
                pipeline.step(x, y)
                pipeline.finish_gradient_sync()
                norm = pipeline.clip_grad_norm_(clip)
                assert_same({"norm": norm}, {"norm": expected}, RTOL, f"{name}, tied {tied},")
                own = own_gradients(pipeline)
                assert_same(own, only(gradients_of(plain), own), RTOL, f"gradient, {name}, tied {tied},")

    run_ranks(work, 2)


def test_the_norm_is_that_of_all_stages():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        plain, pipeline = gpt(num_layers=2), pipeline_of(gpt(num_layers=2), x)
        loss_of(plain(x), y).backward()
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert_same({"norm": pipeline.clip_grad_norm_(1.0)}, {"norm": expected}, RTOL)

    run_ranks(work, 2, timeout=20)


def test_names_of_arguments_evaluation_mode_and_layouts_make_no_difference():
    def work(cluster: Cluster) -> None:
        x, y = vectors(4)
        plain, pipeline = mlp(2), pipeline_of(mlp(2), x)
        loss_of(plain(x), y).backward()
        pipeline.eval()
        pipeline.step(x=x.t().contiguous().t(), y=y)
        pipeline.train()
        own = own_gradients(pipeline)
        assert_same(own, only(gradients_of(plain), own), RTOL)

    run_ranks(work, 2)


def test_a_loss_that_is_no_number_and_a_call_are_refused_in_a_sentence():
    def work(cluster: Cluster) -> list[str]:
        x, y = vectors(4)
        sentences = []

        def refused(act: Callable[[], Any]) -> None:
            with pytest.raises(WorkbookError) as error:
                act()
            sentences.append(str(error.value))

        each = partial(nn.functional.cross_entropy, reduction="none")
        pipeline = Pipeline(mlp(2), gpipe(2, 2), each, x[:2])
        refused(lambda: pipeline.step(x, y))
        refused(lambda: pipeline(x))
        return sentences

    first, second = run_ranks(work, 2, group_timeout=20)
    assert (
        first
        == second
        == [
            "loss_of must return one number, the mean over a microbatch, but returned a tensor of [2].",
            "A pipeline computes forward and backward at once: call step(x, y). To evaluate, call "
            "evaluate(x, y) or forward_only(x).",
        ]
    )


def test_a_pipeline_of_one_rank_and_two_of_the_same_ranks_work():
    def work(cluster: Cluster) -> None:
        x, y = vectors(4)
        makers = (lambda: mlp(2), lambda: mlp(3))
        pipelines = [Pipeline(make(), one_f_one_b(cluster.world_size, 2), loss_of, x[:2]) for make in makers]
        for _ in range(2):
            for make, pipeline in zip(makers, pipelines, strict=True):
                pipeline.zero_grad()
                plain = make()
                loss_of(plain(x), y).backward()
                pipeline.step(x, y)
                own = own_gradients(pipeline)
                assert_same(own, only(gradients_of(plain), own), RTOL)
                assert_same(pipeline.full_state_dict(), parameters_of(plain), 0)

    for n in (1, 2):
        run_ranks(work, n)


def test_torchs_own_clipping_and_grad_scalers_are_refused_on_all_ranks_and_a_single_norm_is_not():
    def work(cluster: Cluster) -> list[float]:
        x, y = text(4)
        pipeline = pipeline_of(gpt(), x)
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        with pytest.raises(WorkbookError, match=r"call the pipeline's own clip_grad_norm_\(max_norm\)"):
            nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(WorkbookError, match="train in bfloat16, which needs no scaler"):
            scaler.step(torch.optim.SGD(pipeline.parameters(), lr=0.1))
        return [float(p.grad.norm()) for p in pipeline.parameters()]

    assert all(len(norms) > 3 and min(norms) > 0 for norms in run_ranks(work, 2))
