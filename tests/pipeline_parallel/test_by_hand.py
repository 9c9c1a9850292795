"""The pipelines by hand: in which order a rank does its actions, and what it holds meanwhile."""

from functools import partial

import pytest

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.memory import saved_activations
from lab.trace.observer import observe_module
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.schedules import table_of
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_1f1b_by_hand import OneForwardOneBackward
from pipeline_parallel.train_afab import AllForwardAllBackward
from tests.pipeline_parallel.equivalence import (
    BY_HAND,
    RTOL,
    compare_schedule,
    gpt,
    mlp,
    own_gradients,
    text,
    vectors,
)


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


def check_order(cluster: Cluster, name: str, lesson: type[OwnStages]) -> None:
    for microbatches in (1, 2, 6):
        row = table_of(name, cluster.world_size, microbatches)[cluster.rank]
        wanted = [f"{action.kind}{action.microbatch}" for action in row]
        done = recorded_row(cluster, lesson, microbatches)
        assert done == wanted, f"rank {cluster.rank} of {cluster.world_size} does {done}, and not {wanted}"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_timeline_of_a_step_by_hand_has_the_order_of_its_table(n: int):
    def work(cluster: Cluster) -> None:
        for name in ("naive", "gpipe"):
            check_order(cluster, name, BY_HAND[name])

    run_ranks(work, n, timeout=30)


def test_1f1b_by_hand_has_the_order_of_its_table_on_any_number_of_ranks():
    for n in (1, 2, 3, 4):
        run_ranks(check_order, n, "1f1b", OneForwardOneBackward, timeout=20)


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


def test_1f1b_by_hand_holds_one_microbatch_for_each_rank_from_its_own_on():
    def work(cluster: Cluster) -> None:
        for m in (2, 3, 7):
            found, most = held(cluster, OneForwardOneBackward, m), min(m, 3 - cluster.rank)
            assert found == most, f"rank {cluster.rank} held {found:.2f} of {m} microbatches, and not {most}"

    run_ranks(work, 3, timeout=20)


def test_gpipe_by_hand_holds_all_microbatches():
    def work(cluster: Cluster) -> None:
        assert held(cluster, AllForwardAllBackward, 7) == 7

    run_ranks(work, 3)


def test_fewer_microbatches_than_ranks_and_tied_weights_of_the_first_and_last_stage_train_right():
    def work(cluster: Cluster) -> None:
        for lesson in BY_HAND.values():
            for m in (1, 2):
                make = partial(gpt, num_layers=2)
                compare_schedule(cluster, "1f1b", m, make, text, by_hand=lesson, steps=2)

    run_ranks(work, 4)


def test_gradients_of_two_steps_by_hand_add_up():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        for lesson in BY_HAND.values():
            pipeline = lesson(balanced_stages(gpt(num_layers=2), 2), 2, loss_of, x[:2])
            pipeline.step(x, y)
            once = own_gradients(pipeline)
            pipeline.step(x, y)
            assert_same(own_gradients(pipeline), {name: 2 * each for name, each in once.items()}, RTOL)

    run_ranks(work, 2)
