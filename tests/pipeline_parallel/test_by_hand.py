"""The pipelines by hand, and a schedule: the order of a rank's actions, what it holds, and what it sends."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.ledger import LEDGER
from lab.trace.memory import saved_activations
from lab.trace.observer import observe_module
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.analysis.validate import validate
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.schedules import one_f_one_b, table_of
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_afab import AllForwardAllBackward
from tests.on_ranks import on_ranks
from tests.pipeline_parallel.equivalence import BY_HAND, mlp, vectors


def recorded_row(cluster: Cluster, lesson: type[OwnStages], microbatches: int) -> list[str]:
    """Do a step of small microbatches, and return the rank's actions in the order of the timeline."""
    x, y = vectors(microbatches)
    pipeline = lesson(balanced_stages(mlp(5), cluster.world_size), microbatches, loss_of, x[:1])
    for stage, describe in pipeline.observed():
        observe_module(stage, describe)
    pipeline.step(x, y)
    timeline.start_recording()
    pipeline.step(x, y)
    events = sorted((e for e in timeline.recorded() if "action" in e.args), key=lambda e: e.start_ns)
    assert all(event.args["stage"] == cluster.rank for event in events)
    return [f"{event.args['action']}{event.args['microbatch']}" for event in events]


@pytest.mark.parametrize("name", BY_HAND)
@on_ranks(1, 2, 3, 4, timeout=20)
def test_a_step_by_hand_has_the_order_of_its_table_on_any_number_of_ranks(cluster: Cluster, name: str):
    for microbatches in (1, 2, 6):
        row = table_of(name, cluster.world_size, microbatches)[cluster.rank]
        wanted = [f"{action.kind}{action.microbatch}" for action in row]
        done = recorded_row(cluster, BY_HAND[name], microbatches)
        assert done == wanted, f"rank {cluster.rank} of {cluster.world_size} does {done}, and not {wanted}"


def held(cluster: Cluster, lesson: type[OwnStages], microbatches: int) -> float:
    """Return the most activations that a step holds at a time, counted in microbatches of one row."""
    x, y = vectors(microbatches)
    peaks = []
    for m in (1, microbatches):
        pipeline = lesson(balanced_stages(mlp(3), cluster.world_size), m, loss_of, x[:1])
        with saved_activations(lambda: [x, y, *pipeline.parameters()]) as watch:
            pipeline.step(x[:m], y[:m])
        peaks.append(watch.peak_bytes)
    return peaks[1] / peaks[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@on_ranks(3, timeout=20)
def test_a_step_by_hand_holds_as_many_microbatches_as_it_must(cluster: Cluster, name: str):
    """GPipe holds all, and 1F1B one for each rank from its own on."""
    for m in (2, 3, 7):
        found, most = held(cluster, BY_HAND[name], m), m if name == "gpipe" else min(m, 3 - cluster.rank)
        assert found == most, f"rank {cluster.rank} held {found:.2f} of {m} microbatches, and not {most}"


SIZES = ((1, 1), (2, 1), (2, 4), (3, 2), (4, 4), (4, 9))  # stages, microbatches


def test_a_1f1b_table_can_run():
    for p, m in SIZES:
        table = one_f_one_b(p, m)
        validate(table)
        done = sorted(action for row in table for action in row)
        assert len(done) == 2 * p * m, (
            f"{p} stages and {m} microbatches need {2 * p * m} actions, not {len(done)}"
        )
        for rank, row in enumerate(table):
            assert {action.stage for action in row} == {rank}, (
                f"rank {rank} has actions that are not of stage {rank}"
            )


def test_1f1b_idles_and_holds_no_more_than_the_formulas_say():
    for p, m in SIZES:
        run = simulate(one_f_one_b(p, m), Costs.equal(p, 1, 1, 1))
        bubble = theory.bubble("1f1b", p, m, 1, 1, 1, 1) or 0.0
        assert run.bubble < bubble + 1e-9, (
            f"with {p} stages and {m} microbatches ranks idle {run.bubble:.1%} of a step, not {bubble:.1%}"
        )
        for rank, held in enumerate(run.peak_held):
            most = min(m, p - rank)
            assert held <= most, (
                f"with {p} stages and {m} microbatches rank {rank} holds {held} microbatches, and not {most}"
            )


def step(cluster: Cluster, microbatches: int) -> int:
    """Compare a pipeline with one layer on each rank with one process. Return the messages of a step."""
    torch.manual_seed(0)
    p, x = cluster.world_size, torch.randn(12, 5).double()
    model = nn.Sequential(*(nn.Linear(5 + i, 6 + i) for i in range(p))).double()
    loss = cross_entropy(model(x), y := torch.arange(12) % 3)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    stages = balanced_stages(model, p)
    pipeline = AllForwardAllBackward(stages, microbatches, cross_entropy, x[: 12 // microbatches])
    LEDGER.clear()
    found = pipeline.step(x, y)
    sent = LEDGER.total().messages_sent
    assert_same({"loss": found}, {"loss": loss.detach() if cluster.rank == p - 1 else None}, what="the loss")
    trained = {id(parameter) for parameter in stages[cluster.rank].parameters()}
    own = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in trained}
    got = {name: parameter.grad.clone() for name, parameter in own.items()}
    assert_same(got, {name: expected[name] for name in got}, what=f"gradient, {microbatches} microbatches,")
    others = {name: p.grad for name, p in model.named_parameters() if name not in own}
    assert_same(others, dict.fromkeys(others), what="gradient of another rank's stage,")
    pipeline.step(x, y)
    twice = {name: 2 * expected[name] for name in got}
    assert_same({name: own[name].grad for name in got}, twice, what="gradient that two steps have added up,")
    return sent


def test_two_stages_have_the_gradients_of_one_process():
    run_ranks(step, 2, 2)


def test_four_stages_and_six_microbatches_have_the_gradients_of_one_process():
    for p, m in ((1, 2), (4, 6), (3, 1)):
        run_ranks(step, p, m)


@on_ranks(3)
def test_each_activation_and_each_gradient_is_one_message(cluster: Cluster):
    sent = step(cluster, 4)
    neighbours = (cluster.rank > 0) + (cluster.rank < cluster.world_size - 1)
    assert sent == 4 * neighbours, (
        f"rank {cluster.rank} sent {sent} messages, and not one for each of 4 microbatches and "
        f"{neighbours} neighbours = {4 * neighbours}"
    )
