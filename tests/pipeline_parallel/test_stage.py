"""Stages in a row are the model, under its names."""

from itertools import combinations

import pytest
import torch
from torch import nn

from lab.check import assert_same
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from pipeline_parallel.split import cut
from pipeline_parallel.stage import Stage, parts_of, ties
from tests.pipeline_parallel.equivalence import cnn, gpt, images, mlp, text, vectors

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


def stages_of(model: nn.Module, ranges) -> list[Stage]:
    parts = parts_of(model)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


@EACH_MODEL
def test_however_a_model_is_cut_its_stages_in_a_row_are_the_model(make, batch_of):
    model, (x, _) = make(), batch_of(3)
    expected = model(x)
    for number in range(1, len(parts_of(model)) + 1):
        for ranges in cuts(len(parts_of(model)), number):
            stages, passed_on = stages_of(model, ranges), x
            for stage in stages:
                like = stage.output_like(passed_on)
                passed_on = stage(passed_on)
                assert (like.shape, like.dtype) == (passed_on.shape, passed_on.dtype), ranges
                assert like.device.type == "meta"
            assert torch.equal(passed_on, expected), ranges


@EACH_MODEL
def test_every_parameter_is_in_a_stage_under_its_name_in_the_model_and_is_the_models_own(make, batch_of):
    model = make()
    named = dict(model.named_parameters(remove_duplicate=False))
    stages = stages_of(model, [range(i, i + 1) for i in range(len(parts_of(model)))])
    found = [pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False)]
    assert sorted(name for name, _ in found) == sorted(named)
    assert all(parameter is named[name] for name, parameter in found)
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_a_full_model_as_one_stage_has_its_state_dict():
    model = gpt()
    (stage,) = stages_of(model, [range(len(parts_of(model)))])
    assert_same(stage.state_dict(), model.state_dict(), 0)
    assert {id(p) for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_looking_at_the_outputs_shape_draws_no_random_number_and_changes_nothing():
    model = gpt(dropout=0.5)
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.random.get_rng_state()
    (stage,) = stages_of(model, [range(len(parts_of(model)))])
    assert stage.output_like(text(2)[0]).shape == (2, 5, 13)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(model.state_dict(), before, 0)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(WorkbookError, match=r"A Linear cannot be cut into stages: give an nn\.Sequential"):
        parts_of(nn.Linear(2, 2))


def test_a_tied_embedding_is_a_tie_between_first_and_last_stage_and_none_within_one():
    model = gpt(num_layers=2)
    assert ties(stages_of(model, cut([1.0] * 4, 2))) == [((0, "token_embedding.weight"), (1, "head.weight"))]
    assert ties(stages_of(model, cut([1.0] * 4, 4))) == [((0, "token_embedding.weight"), (3, "head.weight"))]
    assert ties(stages_of(model, cut([1.0] * 4, 1))) == []
    assert ties(stages_of(gpt(num_layers=2, tied=False), cut([1.0] * 4, 2))) == []


def test_a_parameter_of_three_stages_is_refused_with_its_names():
    model = MLP([4, 4, 4, 4])
    model.layers[1].weight = model.layers[2].weight = model.layers[0].weight
    with pytest.raises(WorkbookError) as error:
        ties(stages_of(model, cut([1.0] * 3, 3)))
    assert str(error.value) == (
        "layers.0.weight of stage 0, layers.1.weight of stage 1, layers.2.weight of stage 2 are one "
        "parameter; two stages can share one, not 3."
    )
