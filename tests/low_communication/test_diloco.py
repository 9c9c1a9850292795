"""Test that streaming DiLoCo's ranks equal workers in one process, whose outer optimizer is torch's SGD."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from low_communication.train_diloco import StreamingDiLoCo, divide_in_order
from tests.low_communication.equivalence import (
    OuterSteps,
    Task,
    Workers,
    adamw,
    assert_equals,
    assert_replicas_equal,
    everyone,
    payload,
    train_step,
)
from tests.wrappers import Odd, gpt


def compare(
    cluster: Cluster, name: str, steps: int, h: int, fragments: int, delay: int, mu: float = 0.9
) -> None:
    what = f"{name}, {cluster.world_size} ranks, H {h}, {fragments} fragments, delay {delay}"
    task = Task(name, cluster.world_size)
    workers = Workers(task, adamw)
    module = task.make(cluster.rank)
    model = StreamingDiLoCo(module, h, everyone(cluster), fragments, delay, outer_momentum=mu)
    name_of = {parameter: name for name, parameter in model.module.named_parameters()}
    names = [[name_of[p] for p in fragment.parameters] for fragment in model.fragments]
    assert [name for part in names for name in part] == workers.trained
    outer, optimizer = OuterSteps(workers, names, h, delay, mu), adamw(model.parameters())
    for step in range(steps):
        workers.step()
        outer.after_step()
        train_step(cluster, task, model, optimizer, step)
        model.after_step()
        assert_equals(cluster, model, workers, f"{what}, step {step}")
    outer.finish()
    model.finish()
    assert_equals(cluster, model, workers, f"{what}, at the end")
    assert_replicas_equal(cluster, model, what)
    before = LEDGER.total()
    model.finish()
    assert LEDGER.total() == before, "all ranks have the same parameters already"


@pytest.mark.parametrize("world_size", [1, 3, 4])  # the next test has two
def test_outer_steps_equal_workers_in_one_process(world_size: int):
    def work(cluster: Cluster) -> None:
        compare(cluster, "odd", steps=4, h=2, fragments=2, delay=0)

    run_ranks(work, world_size)


def test_momentum_is_the_same_on_all_ranks_after_two_rounds():
    run_ranks(lambda cluster: compare(cluster, "gpt", steps=4, h=2, fragments=1, delay=0), 2)


def test_fragments_arrive_after_their_delay_and_ranks_keep_what_they_learned_meanwhile():
    def work(cluster: Cluster) -> None:
        compare(cluster, "odd", steps=9, h=4, fragments=2, delay=1)
        compare(cluster, "odd", steps=10, h=3, fragments=3, delay=2)  # several travel at the same time
        compare(cluster, "odd", steps=6, h=3, fragments=1, delay=2, mu=0.0)  # sent in the last step

    run_ranks(work, 2)


def test_a_fragment_is_averaged_with_the_same_one_of_the_other_ranks():
    """Both fragments have the same size, so no collective would notice another order."""

    def work(cluster: Cluster) -> None:
        layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model = StreamingDiLoCo(layers, 2, fragments=2, outer_lr=1.0, outer_momentum=0.0)
        for _ in range(2):
            for i, layer in enumerate(layers):
                nn.init.constant_(layer.weight, 10.0 * i + cluster.rank)
            model.after_step()
            model.finish()
        found = {str(i): layer.weight.detach() for i, layer in enumerate(layers)}
        expected = {str(i): torch.full((2, 2), 10.0 * i + 0.5) for i in range(2)}
        assert_same(found, expected, 1e-6, "parameter of layer")

    run_ranks(work, 2)


def test_what_is_sent_is_rounded_and_no_more():
    """bf16 rounds a change by 1/256 of it at most, and each sum of a ring again; int8 by 1/254, twice."""

    def work(cluster: Cluster, wire: str) -> None:
        task, n = Task("gpt", 3), 3
        workers = Workers(task, adamw)
        model = StreamingDiLoCo(task.make(cluster.rank), 2, wire=wire, outer_lr=1.0, outer_momentum=0.0)
        optimizer, start = adamw(model.parameters()), {name: workers.mean(name) for name in workers.trained}
        for step in range(2):
            workers.step()
            train_step(cluster, task, model, optimizer, step)
            model.after_step()
        assert_replicas_equal(cluster, model, wire)
        largest = max(
            (named[name] - start[name]).abs().max().item() for named in workers.named for name in start
        )
        off = max(
            (model.module.get_parameter(name) - workers.mean(name)).abs().max().item() for name in start
        )
        assert 0 < off <= largest * {"bf16": (n + 1) / 256, "int8": 1.01 / 127}[wire]

    for wire in ("bf16", "int8"):
        run_ranks(work, 3, wire)


def test_it_sends_the_bytes_of_each_fragment_once_in_h_steps():
    def send(cluster: Cluster, steps: int, **options: Any) -> int:
        layers = nn.Sequential(*(nn.Linear(5, 6, bias=False) for _ in range(4)))  # 120 numbers
        model = StreamingDiLoCo(layers, group=everyone(cluster), **options)
        start, before, expected = LEDGER.total(), payload(), Traffic()
        for step in range(steps):
            model.after_step()
            if step == steps - 1:
                model.finish()
            expected += model.traffic()
        assert expected == LEDGER.total() - start, options
        return payload() - before

    def work(cluster: Cluster) -> None:
        n = cluster.world_size
        all_at_once = 2 * (n - 1) * 120 * 4 // n
        assert send(cluster, 6, sync_every=1) == 6 * all_at_once
        assert send(cluster, 8, sync_every=4) == 2 * all_at_once
        assert send(cluster, 9, sync_every=4) == 3 * all_at_once  # and once more after the last step
        assert send(cluster, 8, sync_every=4, fragments=2) == 2.5 * all_at_once
        assert send(cluster, 12, sync_every=4, fragments=4, delay=2) == 3.75 * all_at_once
        assert send(cluster, 8, sync_every=4, wire="bf16") == all_at_once
        assert send(cluster, 8, sync_every=4, wire="int8") == 2 * 2 * (n - 1) * 1028  # a block for each rank

    run_ranks(work, 3)


def test_fragments_are_about_equal_and_have_each_parameter_once_in_order():
    trained = list(gpt(0).parameters())
    for number in (1, 2, 3, 5):
        fragments = divide_in_order(trained, number)
        assert len(fragments) <= number
        assert all(a is b for a, b in zip(itertools.chain(*fragments), trained, strict=True))
    equal = [nn.Parameter(torch.zeros(3)) for _ in range(6)]
    assert [len(fragment) for fragment in divide_in_order(equal, 3)] == [2, 2, 2]


def test_options_that_do_not_fit_are_refused_in_a_sentence():
    def work(cluster: Cluster) -> None:
        for options, sentence in (
            ({"sync_every": 0}, "^sync_every is 0: it is a number of steps, at least 1.$"),
            ({"fragments": 0}, "^fragments is 0: it is a number from 1 to "),
            (
                {"fragments": 3},
                "^fragments is 3: .* 2 steps between two synchronisations, and 9 parameters.$",
            ),
            ({"delay": 2}, "^delay is 2: it is a number of steps from 0, and less than sync_every, 2.$"),
            ({"delay": 1}, "^With a delay, .* give DiLoCo a group of its own.$"),
            ({"wire": "topk"}, "^wire is topk: choose one of float32, bf16, int8.$"),
            ({"outer_lr": 0.0}, "^outer_lr is 0.0: it is a number above 0.$"),
            ({"outer_momentum": 1.0}, "^outer_momentum is 1.0: it is a number from 0, and less than 1.$"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                StreamingDiLoCo(Odd(0), **{"sync_every": 2, **options})

    run_ranks(work, 1)
