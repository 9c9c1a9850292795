"""Any chain of modules is split among the stages, by costs or as given, and trains as one process does."""

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.stream_clock import time_when_done
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b, stages_per_rank, table_of
from pipeline_parallel.split import costs_of, cut, measured_costs, split_as_given
from pipeline_parallel.stage import Part, Stage, parts_of
from tests.lab.simulated_gpu import simulated_gpu
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    RTOL,
    Batch,
    compare_with_one_process,
    gpt,
    images,
    parameters_of,
    text,
    vectors,
)
from tests.pipeline_parallel.test_failure import sentence_of
from tests.pipeline_parallel.test_stage import EACH_MODEL, cuts

README = Path(__file__).parents[2] / "pipeline_parallel" / "README.md"


def sequential_mlp(hidden: int) -> nn.Sequential:
    """Make an MLP of 2 * hidden + 1 modules, of different widths."""
    torch.manual_seed(0)
    widths = [5 + i % 4 for i in range(hidden + 1)]
    layers = [(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(widths)]
    return nn.Sequential(*[module for pair in layers for module in pair], nn.Linear(widths[-1], 6)).double()


def sequential_cnn() -> nn.Sequential:
    """Make BabyCNN of plain modules: ten of them, six without parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10), nn.Identity()),
    ).double()


def tied() -> nn.Sequential:
    """Make a language model whose embedding is its last layer's weight, too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        *(nn.LayerNorm(8), nn.Linear(8, 13, bias=False)),
    )
    model[7].weight = model[0].weight
    return model.double()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_sequential_has_the_gradients_of_one_process_with_every_schedule(n: int):
    def work(cluster: Cluster) -> None:
        for name, chunks in ALL_SCHEDULES:
            table = table_of(name, n, n + 1, chunks)
            stages = n * stages_per_rank(name, chunks)
            cases: list[tuple[Any, Batch]] = [(partial(sequential_mlp, (stages + 1) // 2), vectors(n + 1))]
            cases += [(tied, text(n + 1)), (sequential_cnn, images(n + 1))] if stages <= 8 else []
            for make, batch in cases:
                compare_with_one_process(cluster, make, table, batch, what=f" {name}", steps=1)

    run_ranks(work, n)


def test_split_as_given_and_costs_of_any_kind_change_nothing():
    def work(cluster: Cluster) -> None:
        table, make = one_f_one_b(3, 2), partial(sequential_mlp, 3)
        options: list[dict[str, Any]] = [
            {"split": [1, 1, 5]},
            {"split": (5, 1, 1)},
            {"costs": "parameters"},
            {"costs": "time"},
            {"costs": [1.0] * 7},
        ]
        for one in options:
            compare_with_one_process(cluster, make, table, vectors(4), what=f" {one}", **one)
        compare_with_one_process(cluster, partial(gpt, num_layers=4), table, text(2), split=[3, 2, 1])

    run_ranks(work, 3)


def in_place() -> nn.Sequential:
    torch.manual_seed(0)
    relu = partial(nn.ReLU, inplace=True)
    block = nn.Sequential(relu(), nn.Linear(7, 6))
    return nn.Sequential(nn.Linear(5, 6), relu(), nn.Linear(6, 7), block).double()


def test_a_stage_may_begin_with_a_module_that_works_in_place():
    def work(cluster: Cluster) -> None:
        options: list[dict[str, Any]] = [{"split": [1, 2, 1]}, {"split": [1, 1, 2]}, {"costs": "time"}]
        for one in options:
            compare_with_one_process(cluster, in_place, one_f_one_b(3, 2), vectors(4), what=f" {one}", **one)

    run_ranks(work, 3)


def test_a_list_of_modules_is_their_composition():
    def work(cluster: Cluster) -> None:
        x, y = vectors(4)
        plain = sequential_mlp(2)
        loss_of(plain(x), y).backward()
        for modules in (list(sequential_mlp(2)), tuple(sequential_mlp(2)), nn.ModuleList(sequential_mlp(2))):
            pipeline = Pipeline(modules, one_f_one_b(2, 2), loss_of, x[:2], split=[3, 2])
            pipeline.step(x, y)
            own = {name: p.grad for name, p in pipeline.named_own_parameters().items()}
            expected = {name: p.grad for name, p in plain.named_parameters() if name in own}
            assert_same(own, expected, RTOL, "gradient,")
            assert len(own) == (4 if cluster.rank == 0 else 2)
            assert_same(pipeline.full_state_dict(), parameters_of(plain), 0)

    run_ranks(work, 2)


def test_a_wrong_split_or_costs_are_refused_in_a_sentence_on_all_ranks():
    class Other(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    def work(cluster: Cluster) -> list[str]:
        x, _ = vectors(2)
        table = one_f_one_b(3, 2)
        model = sequential_mlp(2)  # of five modules
        odd = [3, 1, 1] if cluster.rank else [1, 3, 1]
        calls = [
            lambda: Pipeline(model, table, loss_of, x, split=[3, 2]),
            lambda: Pipeline(model, table, loss_of, x, split=[3, 2, 1]),
            lambda: Pipeline(model, table, loss_of, x, split=[3, 2, 0]),
            lambda: Pipeline(model[:2], table, loss_of, x),
            lambda: Pipeline(model, table, loss_of, x, costs=[1.0, 2.0]),
            lambda: Pipeline(model, table, loss_of, x, costs="weight"),
            lambda: Pipeline(model, table, loss_of, x, split=odd),
            lambda: Pipeline([model[0], torch.relu, model[2]], table, loss_of, x),
            lambda: Pipeline(Other(*model), table, loss_of, x),
        ]
        return [sentence_of(call) for call in calls]

    first, *others = run_ranks(work, 3, timeout=20)
    assert all(other == first for other in others)
    starts = (
        "split=[3, 2] is for 2 stages, and the schedule has 3.",
        "split=[3, 2, 1] does not divide the model's 5 parts: give numbers of at least 1 whose sum is 5.",
        "split=[3, 2, 0] does not divide the model's 5 parts",
        "2 parts cannot be cut into 3 stages: take fewer ranks or --chunks, or more --layers.",
        "costs has 2 numbers, and the model has 5 parts.",
        "costs='weight' is unknown: give 'parameters', 'time' or a number for each part.",
        "The ranks make different pipelines: give the same model, schedule, costs and split on all ranks.",
        "A pipeline takes a list of nn.Modules, and this one holds <built-in method relu",
        "A Other cannot be cut into stages: give an nn.Sequential, or a list of modules",
    )
    for sentence, start in zip(first, starts, strict=True):
        assert sentence.startswith(start), sentence


def test_a_sequential_is_cut_by_its_parameters_and_a_gpt_by_its_blocks():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1), nn.Linear(1, 1), nn.Linear(1, 10))
    assert [part.cost for part in parts_of(model)] == [110, 0, 11, 2, 20]
    assert cut([part.cost for part in parts_of(model)], 2) == [range(2), range(2, 5)]
    small = gpt(num_layers=2)
    assert [part.cost for part in parts_of(small)] == [0, 1, 1, 0]
    embedding, *blocks, head = costs_of(small, parts_of(small), "parameters")
    assert embedding == 13 * 8 + 5 * 8 and head == 13 * 8 + 16 and len(set(blocks)) == 1


def test_a_split_as_given_is_taken_as_it_is():
    assert split_as_given(8, [3, 2, 3], 3) == [range(3), range(3, 5), range(5, 8)]


def test_measuring_leaves_statistics_and_random_numbers_as_they_are():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.random.get_rng_state()
    assert len(measured_costs(model, vectors(6)[0], repeats=2)) == 4
    assert_same(model.state_dict(), before, 0)
    assert torch.equal(torch.random.get_rng_state(), random)


def test_the_example_of_the_readme_trains_and_evaluates(capfd):
    (block,) = re.findall(r"```python\n(from torch import nn\n.*?)```", README.read_text(), re.DOTALL)
    exec(compile(block, "README", "exec"), {"__name__": "readme"})
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_cheaper_dearest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))

    def dearest(ranges) -> float:
        return max(sum(costs[i] for i in of_stage) for of_stage in ranges)

    found = cut(costs, stages)
    assert [i for of_stage in found for i in of_stage] == list(range(len(costs)))
    assert len(found) == stages and all(len(of_stage) > 0 for of_stage in found)
    assert dearest(found) == min(map(dearest, cuts(len(costs), stages)))


def test_layers_that_stages_do_not_divide_are_spread_evenly():
    def blocks(layers: int, stages: int) -> list[int]:
        costs = [part.cost for part in parts_of(gpt(num_layers=layers))]
        return [int(sum(costs[i] for i in of_stage)) for of_stage in cut(costs, stages)]

    assert blocks(8, 4) == [2, 2, 2, 2]
    assert sorted(blocks(7, 4)) == [1, 2, 2, 2]
    assert sorted(blocks(9, 4)) == [2, 2, 2, 3]
    assert sorted(blocks(10, 4)) == [2, 2, 3, 3]


def test_more_stages_than_parts_are_refused_in_a_sentence():
    with pytest.raises(WorkbookError) as error:
        cut([1.0] * 3, 4)
    assert str(error.value) == (
        "3 parts cannot be cut into 4 stages: take fewer ranks or --chunks, or more --layers."
    )


@EACH_MODEL
def test_measuring_costs_leaves_gradients_as_they_are_and_needs_none(make, batch_of):
    for trains in (True, False):
        model = make().requires_grad_(trains)
        costs = measured_costs(model, batch_of(2)[0], repeats=1)
        assert len(costs) == len(parts_of(model)) and all(cost > 0 for cost in costs)
        assert all(parameter.grad is None for parameter in model.parameters())
        some = next(model.parameters())
        some.grad = torch.full_like(some, 3.0)
        measured_costs(model, batch_of(2)[0], repeats=1)
        assert torch.equal(some.grad, torch.full_like(some, 3.0))


def test_a_gpus_costs_are_what_it_computes_and_not_what_the_host_launches():
    def launching(ms: float) -> Part:
        def forward(stage: Stage, x: Tensor) -> Tensor:
            gpu.launch(ms)
            return x

        return Part((), forward)

    parts = [launching(2.0), launching(6.0)]
    with (
        simulated_gpu() as gpu,
        mock.patch("pipeline_parallel.split.parts_of", lambda model: parts),
        # The tensors are the CPU's, so their device would not be waited for.
        mock.patch("pipeline_parallel.split.time_when_done", lambda _: time_when_done(gpu.device)),
    ):
        assert measured_costs(nn.Identity(), torch.zeros(1, dtype=torch.int64)) == [0.002, 0.006]


def test_costs_of_another_number_than_parts_lose_no_layer():
    model = sequential_mlp(2)
    try:
        taken = [
            part for of_stage in cut(costs_of(model, parts_of(model), [1.0] * 3), 2) for part in of_stage
        ]
    except WorkbookError:
        return
    assert taken == list(range(5))
