"""Stages in a row are the model, under its names."""

import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.check import assert_same
from lab.launch.errors import WorkbookError
from lab.models.parts import parts_of
from pipeline_parallel.stage import Stage, balanced_stages, costs_of, cut
from tests.pipeline_parallel.equivalence import cnn, gpt, images, mlp, text, vectors

README = Path(__file__).parents[2] / "pipeline_parallel" / "README.md"
MODELS = {
    "gpt": (lambda: gpt(num_layers=2), text),
    "mlp": (lambda: mlp(5), vectors),
    "cnn": (cnn, images),
}
EACH_MODEL = pytest.mark.parametrize("make, batch_of", MODELS.values(), ids=MODELS)


def cuts(parts: int, stages: int):
    """Yield all ways to cut `parts` parts into stages."""
    for ends in combinations(range(1, parts), stages - 1):
        yield [range(start, end) for start, end in zip((0, *ends), (*ends, parts), strict=True)]


def stages_in(model: nn.Module, ranges) -> list[Stage]:
    parts = parts_of(model)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


@EACH_MODEL
def test_however_a_model_is_cut_its_stages_in_a_row_are_the_model(make, batch_of):
    model, (x, _) = make(), batch_of(3)
    expected = model(x)
    for number in range(1, len(parts_of(model)) + 1):
        for ranges in cuts(len(parts_of(model)), number):
            stages, passed_on = stages_in(model, ranges), x
            for stage in stages:
                like = stage.output_like(passed_on)
                passed_on = stage(passed_on)
                assert (like.shape, like.dtype) == (passed_on.shape, passed_on.dtype), ranges
                assert like.device.type == "meta"
            assert torch.equal(passed_on, expected), ranges


class Caching(nn.Module):
    """Counts its calls, and keeps a tensor and a buffer of the first one, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.angles = nn.BatchNorm1d(5, momentum=None), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.angles is None:
            self.angles = x.detach().cos()
            self.register_buffer("scale", torch.ones_like(x))
        return self.norm(x) * self.angles * self.scale * (2 if torch.rand(()) < 0.5 else 3)


def test_finding_a_shape_leaves_no_trace_in_modules_and_random_numbers():
    module = Caching()
    stage, state, attributes = balanced_stages([module], 1)[0], torch.get_rng_state(), vars(module).copy()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert stage.output_like(torch.ones(3, 5)).shape == (3, 5)
    assert torch.equal(torch.get_rng_state(), state) and vars(module) == attributes
    assert_same(dict(module.named_buffers()), buffers, 0, "buffer")


@EACH_MODEL
def test_every_parameter_is_in_a_stage_under_its_name_in_the_model_and_is_the_models_own(make, batch_of):
    model = make()
    named = dict(model.named_parameters(remove_duplicate=False))
    stages = stages_in(model, [range(i, i + 1) for i in range(len(parts_of(model)))])
    found = [pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False)]
    assert sorted(name for name, _ in found) == sorted(named)
    assert all(parameter is named[name] for name, parameter in found)
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_a_sequential_is_cut_by_its_parameters_and_a_gpt_by_its_blocks():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1), nn.Linear(1, 1), nn.Linear(1, 10))
    assert costs_of(model, parts_of(model), "layers") == [110, 0, 11, 2, 20]
    assert cut([110, 0, 11, 2, 20], 2) == [range(2), range(2, 5)]
    small = gpt(num_layers=2)
    assert costs_of(small, parts_of(small), "layers") == [0, 1, 1, 0]
    embedding, *blocks, head = costs_of(small, parts_of(small), "parameters")
    assert embedding == 13 * 8 + 5 * 8 and head == 13 * 8 + 16 and len(set(blocks)) == 1


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_cheaper_dearest_stage(costs, data):
    """And of those that are equal no other is more even, or goes on with a part that costs nothing."""
    stages = data.draw(st.integers(1, len(costs)))

    def order(ranges) -> tuple:
        of_stages = [sum(costs[i] for i in of_stage) for of_stage in ranges]
        return max(of_stages), sum(cost**2 for cost in of_stages), [-of_stage.stop for of_stage in ranges]

    found = cut(costs, stages)
    assert [i for of_stage in found for i in of_stage] == list(range(len(costs)))
    assert len(found) == stages and all(len(of_stage) > 0 for of_stage in found)
    assert order(found) == min(map(order, cuts(len(costs), stages)))


def test_beside_an_expensive_part_the_others_are_even():
    costs = [20, 3, 3, 7, 1]
    found = [[costs[i] for i in of_stage] for of_stage in cut(costs, 4)]
    assert found == [[20], [3], [3], [7, 1]], "[20], [3, 3], [7], [1] has as large a stage, and is less even"


def test_layers_that_stages_do_not_divide_are_spread_evenly():
    def blocks(layers: int, stages: int) -> list[int]:
        model = gpt(num_layers=layers)
        costs = [float(part.layers) for part in parts_of(model)]
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


def test_the_example_of_the_readme_trains_and_evaluates(capfd):
    (block,) = re.findall(r"```python\n(from torch import nn\n.*?)```", README.read_text(), re.DOTALL)
    exec(compile(block, "README", "exec"), {"__name__": "readme"})
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0]
