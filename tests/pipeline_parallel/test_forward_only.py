"""A pipeline evaluates: forwards alone, with the outputs and the loss of one process, and no other effect."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from comm.cost import Link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.gantt import draw
from lab.trace.ledger import LEDGER
from lab.trace.timeline import recorded, start_recording, stop_recording
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.analysis.validate import grid, validate
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import forward_only, naive, one_f_one_b, stages_per_rank, table_of
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    RTOL,
    Batch,
    assert_nothing_is_left,
    cnn,
    gpt,
    gradients_of,
    images,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)
from tests.pipeline_parallel.test_failure import failing, sentence_of

LESSONS = {"naive": ModelParallel, "gpipe": AllForwardAllBackward}


def evaluated(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the outputs and the loss of one process."""
    model.eval()
    with torch.no_grad():
        output = model(batch[0])
        return output, loss_of(output, batch[1])


def compare_evaluation(pipeline: Pipeline, make: Callable[[], nn.Module], batch: Batch, what: str) -> None:
    """Compare outputs, loss and traffic with those of one process and of the formula."""
    x, y = batch
    output, loss = evaluated(make(), batch)
    last = pipeline.rank_of[max(pipeline.rank_of)] == pipeline.rank
    before = LEDGER.total()
    found = pipeline.forward_only(x if pipeline.rank == 0 else None)
    sent = LEDGER.total() - before
    assert (found is not None) == last, what
    assert found is None or not found.requires_grad
    assert_same({"output": found}, {"output": output if last else None}, RTOL, what)
    assert sent == pipeline.traffic_of_forward_only(), what
    before = LEDGER.total()
    found_loss = pipeline.evaluate(x if pipeline.rank == 0 else None, y if last else None)
    assert_same({"loss": found_loss}, {"loss": loss}, RTOL, what)
    assert LEDGER.total() - before == pipeline.traffic_of_evaluate(), what
    assert_nothing_is_left(pipeline, what)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_outputs_and_loss_are_those_of_one_process_for_every_schedule(n: int):
    def work(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            stages = n * stages_per_rank(name, chunks)
            table = table_of(name, n, n + 1, chunks)
            dropping = partial(gpt, num_layers=max(1, stages - 1), dropout=0.4)
            cases: list[tuple[Any, Batch]] = [(partial(mlp, stages + 1), vectors(2 * (n + 1)))]
            cases += [(dropping, text(n + 1))] if stages <= 4 else []
            cases += [(cnn, images(n + 1))] if stages <= 4 else []
            for make, batch in cases:
                pipeline = Pipeline(make(), table, loss_of, batch[0][: len(batch[0]) // (n + 1)])
                compare_evaluation(pipeline, make, batch, f"{name}, {chunks}")

    run_ranks(work, n)


def test_evaluation_leaves_gradients_modes_and_random_numbers_as_they_are():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        for name, lesson in (("1f1b", None), ("zb_v", None), *LESSONS.items()):
            make = partial(gpt, num_layers=4, dropout=0.4)
            pipeline = Pipeline(make(), table_of(name, 2, 2), loss_of, x[:2], by_hand=lesson)
            pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            frozen = next(module for module in pipeline.modules() if isinstance(module, nn.Dropout))
            frozen.eval()  # by the user, alone
            modes = [module.training for module in pipeline.modules()]
            before, random = own_gradients(pipeline), torch.random.get_rng_state()
            compare_evaluation(pipeline, make, (x, y), name)
            assert_same(own_gradients(pipeline), before, 0, f"gradient, {name},")
            assert [module.training for module in pipeline.modules()] == modes, name
            assert torch.equal(torch.random.get_rng_state(), random), name

    run_ranks(work, 2)


def test_a_step_after_an_evaluation_is_that_of_one_process():
    def work(cluster: Cluster) -> None:
        x, y = vectors(6)
        for name, lesson in [*((name, None) for name, _ in ALL_SCHEDULES), *LESSONS.items()]:
            make = partial(mlp, 2 * stages_per_rank(name))
            pipeline = Pipeline(make(), table_of(name, 2, 3), loss_of, x[:2], by_hand=lesson)
            for _ in range(2):
                pipeline.evaluate(x, y)
                pipeline.zero_grad()
                pipeline.step(x, y)
                plain = make()
                loss_of(plain(x), y).backward()
                own = own_gradients(pipeline)
                assert_same(own, only(gradients_of(plain), own), RTOL, f"gradient, {name},")

    run_ranks(work, 2)


def test_training_goes_on_with_dropout_after_an_evaluation():
    def work(cluster: Cluster) -> None:
        x, y = text(2)
        pipeline = Pipeline(gpt(num_layers=2, dropout=0.5), one_f_one_b(2, 2), loss_of, x[:1])
        pipeline.evaluate(x, y)
        assert all(module.training for module in pipeline.modules())

    run_ranks(work, 2, timeout=20)


def test_a_rank_keeps_no_graph_and_one_microbatch_at_a_time():
    def work(cluster: Cluster) -> None:
        x, y = vectors(12)
        pipeline = Pipeline(mlp(4), one_f_one_b(2, 12), loss_of, x[:1], recompute=True)
        saved, results, alive = [], [], []

        def note(layer, args, y) -> None:
            results.append(weakref.ref(y))
            alive.append(sum(result() is not None for result in results))

        (stage,) = pipeline.stages.values()
        stage.layers["0" if cluster.rank == 0 else "2"].register_forward_hook(note)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            pipeline.evaluate(x, y)
            pipeline.forward_only(x)
        assert not saved and max(alive) <= 2, alive

    run_ranks(work, 2)


def test_microbatches_follow_each_other_through_the_stages():
    """Under the clock: a naive pipeline evaluates as fast as the others, for no gradient comes back."""
    tick, n, m = 0.01, 3, 6

    def work(cluster: Cluster) -> list[float]:
        x, y = vectors(m)
        seconds = []
        for name in ("naive", "1f1b"):
            pipeline = Pipeline(mlp(3), table_of(name, n, m), loss_of, x[:1], tick=tick)
            best = []
            for _ in range(3):
                start_recording()
                pipeline.evaluate(x, y)
                stop_recording()
                actions = [event for event in recorded() if "action" in event.args]
                assert [event.args["microbatch"] for event in actions] == list(range(m))
                best.append((actions[-1].end_ns - actions[0].start_ns) / 1e9)
            seconds.append(min(best))
        return seconds

    for of_rank in run_ranks(work, n):
        for seconds in of_rank:  # a rank that waited for the last stage would take 3 times as long
            assert 0.98 * m * tick < seconds < 2 * m * tick, of_rank


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_on_one_rank_raises_one_sentence_on_the_others(stage: int):
    x, y = vectors(8)

    def work(cluster: Cluster) -> list[str]:
        found = []
        for name, lesson in (("1f1b", None), ("zb_h1", None), *LESSONS.items()):
            model, fails = failing(3, stage, 2)
            pipeline = Pipeline(model, table_of(name, 3, 4), loss_of, x[:2], by_hand=lesson)
            fails.is_armed, fails.seen = True, 0
            found.append(sentence_of(lambda: pipeline.forward_only(x)))
            fails.seen = 0
            found.append(sentence_of(lambda: pipeline.evaluate(x, y)))
            fails.is_armed = False
            output, _ = evaluated(failing(3, stage, 2)[0], (x, y))
            again = pipeline.forward_only(x)
            assert_same({"x": again}, {"x": None if cluster.rank < 2 else output}, RTOL)
            assert pipeline.training
        return found

    for of_ranks in zip(*run_ranks(work, 3, group_timeout=20), strict=True):
        told = f"Rank {stage} failed in the forward of microbatch 2 in stage {stage}: ValueError: the forward"
        for rank, sentence in enumerate(of_ranks):
            assert sentence == f"{'ValueError: the forward' if rank == stage else told} broke" + "." * (
                rank != stage
            )


def test_a_batch_or_a_loss_that_does_not_fit_is_refused_by_all_ranks():
    x, y = vectors(6)

    def work(cluster: Cluster) -> list[str]:
        pipeline = Pipeline(mlp(3), one_f_one_b(3, 3), loss_of, x[:2])
        each = Pipeline(mlp(3), one_f_one_b(3, 3), lambda output, target: output, x[:2])
        calls = [
            lambda: pipeline.forward_only(x[:5]),
            lambda: pipeline.forward_only(),
            lambda: pipeline.evaluate(x),
            lambda: pipeline.evaluate(x, y[:3]),
            lambda: each.evaluate(x, y),
        ]
        return [sentence_of(call) for call in calls]

    first, *others = run_ranks(work, 3, timeout=20)
    assert all(other == first for other in others)
    starts = (
        "A batch of 5 cannot be divided into 3 equal microbatches",
        "The rank of the first stage needs x, and got None.",
        "The rank of the last stage needs y, and got None.",
        "y has 3 rows, but",
        "loss_of must return one number",
    )
    for sentence, start in zip(first, starts, strict=True):
        assert sentence.startswith(start), sentence


def test_an_error_in_the_last_stage_reaches_the_ranks_before_it():
    def work(cluster: Cluster) -> str:
        x, _ = vectors(2)
        model, fails = failing(2, 1, 0)
        pipeline = Pipeline(model, one_f_one_b(2, 2), loss_of, x[:1])
        fails.is_armed, fails.seen = True, 0
        try:
            pipeline.forward_only(x)
        except (WorkbookError, ValueError) as error:
            return str(error)
        return "nothing"

    first, second = run_ranks(work, 2, timeout=20)
    assert first == f"Rank 1 failed in the forward of microbatch 0 in stage 1: ValueError: {second}."


def test_evaluation_works_under_autocast_and_inference_mode():
    def work(cluster: Cluster) -> None:
        x, y = vectors(4)
        x = x.float()
        pipeline = Pipeline(mlp(2).float(), one_f_one_b(2, 2), loss_of, x[:2])
        for context in (nullcontext(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
            with context:
                _, loss = evaluated(mlp(2).float(), (x, y))
                torch.testing.assert_close(pipeline.evaluate(x, y), loss.double(), rtol=1e-6, atol=0)

    run_ranks(work, 2)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_the_forwards_of_every_schedule_are_a_valid_table(ranks: int, microbatches: int, chunks: int):
    for name, _ in ALL_SCHEDULES:
        table = forward_only(table_of(name, ranks, microbatches, chunks))
        validate(table, max_held=1, trains=False)
        stages = ranks * stages_per_rank(name, chunks)
        assert sum(map(len, table)) == microbatches * stages
        simulated = simulate(table, Costs.equal(stages, 1, 1, 1))
        assert simulated.peak_held == [1] * ranks
        if stages == ranks:
            assert simulated.makespan == microbatches + ranks - 1


def test_a_table_of_forwards_is_drawn_and_simulated_as_the_others(tmp_path):
    table = forward_only(naive(2, 3))
    assert grid(table).split("\n") == ["rank 0   0F0  0F1  0F2", "rank 1   1F0  1F1  1F2"]
    draw(simulate(table, Costs.equal(2, 1, 1, 1), Link(0.5, 0)).events(), tmp_path / "x.png", "evaluation")
    assert (tmp_path / "x.png").stat().st_size > 1000
