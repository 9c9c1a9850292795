"""The memory model counts what the papers and the lessons count."""

from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_parallel.planner.memory_model import (
    fullest_ranks,
    has_head,
    layer_activations,
    layers_by_stage,
    layers_of,
    parameters_of,
    predict_memory,
)
from hybrid_parallel.planner.mlp_shape import MLPShape
from hybrid_parallel.planner.shapes import SHAPES, ModelShape, workbook_shape
from hybrid_parallel.sizes import ParallelSizes
from lab.models.model import GPT as Model
from lab.models.model import SIZES, GPTConfig, loss_of
from lab.trace.memory import saved_activations
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import table_of
from tensor_parallel.run import activations_formula
from zero.memory import Held, formula

GPT = ModelShape(8, 64, 8, 256, 32, dropout=True, fused_attention=False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_layers_activations_are_those_of_korthikantis_equations_2_and_4(
    ranks: int, sequence_parallel: bool
):
    config = GPTConfig(256, 32, num_layers=1, num_heads=8, width=64)
    sizes = ParallelSizes(tensor=ranks, sequence_parallel=sequence_parallel, precision="bf16")
    expected = activations_formula(config, 3, ranks, sequence_parallel)
    assert 3 * 32 * layer_activations(GPT, sizes) == pytest.approx(expected)


def test_norms_are_divided_by_sequence_parallelism_only():
    of = [layer_activations(GPT, ParallelSizes(tensor=t, sequence_parallel=True)) for t in (1, 4)]
    assert of[0] / of[1] == 4
    assert layer_activations(GPT, ParallelSizes(tensor=4)) > of[1]


@pytest.mark.parametrize("name", ["small", "24heads", "13m"])
def test_predicted_activations_are_within_1_percent_of_what_a_forward_holds_at_its_end(name: str):
    gpt = Model(SIZES[name])
    tokens = torch.randint(0, 256, (4, SIZES[name].block_size))
    with saved_activations(gpt.parameters) as saved:
        logits = gpt(tokens)
        loss_of(logits, tokens)
    predicted = predict_memory(workbook_shape(name), ParallelSizes(), 4)
    assert predicted.activations + predicted.temporary == pytest.approx(saved.bytes + logits.nbytes, rel=0.01)


@pytest.mark.parametrize("zero", range(4))
def test_the_state_of_a_rank_is_the_papers_table(zero: int):
    held = predict_memory(GPT, ParallelSizes(data=4, zero=zero, precision="bf16"), 4)
    numbers = parameters_of(GPT, ParallelSizes(), 0)
    expected = formula(zero, Held(2 * numbers, 2 * numbers, 12 * numbers), 4)
    assert (held.parameters, held.gradients, held.optimizer_state) == astuple(expected)


def test_adam_in_mixed_precision_takes_16_bytes_for_each_parameter():
    held = predict_memory(SHAPES["llama-3-8b"], ParallelSizes(precision="bf16"), 1)
    state = held.parameters + held.gradients + held.optimizer_state
    assert state == pytest.approx(16 * SHAPES["llama-3-8b"].num_parameters, rel=1e-4)


@given(st.integers(1, 40), st.integers(1, 40))
def test_layers_are_divided_as_evenly_as_can_be(layers: int, stages: int):
    by_stage = layers_by_stage(layers, stages)
    assert sum(by_stage) == layers and len(by_stage) == stages
    assert max(by_stage) - min(by_stage) <= 1
    assert by_stage[-1] == min(by_stage)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_all_ranks_together_hold_each_layer_once(schedule: str):
    for shape in (GPT, replace(GPT, num_layers=11)):
        sizes = ParallelSizes(pipeline=3, schedule=schedule, chunks=3)
        assert sum(layers_of(shape, sizes, rank) for rank in range(3)) == shape.num_layers
        assert sum(has_head(sizes, rank) for rank in range(3)) == 1


@given(
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(2, 4),
    st.sampled_from(["1f1b", "interleaved", "zb_v"]),
)
def test_no_rank_has_more_layers_than_the_fullest_ones(layers: int, pipeline: int, chunks: int, schedule):
    shape, sizes = replace(GPT, num_layers=layers), ParallelSizes(pipeline, schedule=schedule, chunks=chunks)
    most = max(layers_of(shape, sizes, rank) for rank in fullest_ranks(sizes))
    assert most == max(layers_of(shape, sizes, rank) for rank in range(pipeline))


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_holds_tied_weights_twice(tied: bool):
    shape = replace(GPT, tied=tied)
    held = sum(parameters_of(shape, ParallelSizes(pipeline=4), rank) for rank in range(4))
    final_norm = 2 * shape.width
    assert held - (shape.num_parameters - final_norm) == (shape.head_parameters if tied else 0)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_the_activations_of_a_pipeline_are_those_that_the_simulator_counts(schedule: str):
    shape = replace(GPT, num_layers=16, vocab_size=1, tied=False)  # the ranks hold almost equal parameters
    for microbatches in (1, 4, 9):
        sizes = ParallelSizes(pipeline=4, schedule=schedule, chunks=2, microbatches=microbatches)
        predicted = predict_memory(shape, sizes, microbatches).activations
        timeline = simulate(table_of(schedule, 4, microbatches, 2), Costs.equal(sizes.num_stages, 1, 1, 1))
        layer = shape.sequence_length * layer_activations(shape, sizes)
        stage = round(layer * shape.num_layers / sizes.num_stages)
        held = timeline.peak_bytes([stage] * sizes.num_stages, [stage] * sizes.num_stages)
        assert predicted == max(held)
        assert held == [theory.held(schedule, 4, microbatches, 2, rank) * stage for rank in range(4)]


def test_recomputation_keeps_the_input_of_each_layer_and_one_layer_more():
    sizes = ParallelSizes(precision="bf16")
    kept, again = (predict_memory(GPT, replace(sizes, recompute=r), 1) for r in (False, True))
    of_layer = kept.activations / GPT.num_layers
    assert again.activations == GPT.num_layers * GPT.sequence_length * GPT.width * 2
    assert again.temporary - kept.temporary == of_layer


def test_a_vocabulary_counts_on_the_rank_with_the_head_alone():
    small, large = (replace(GPT, vocab_size=size) for size in (256, 512))
    sizes = ParallelSizes(tensor=2, microbatches=1)
    more = predict_memory(large, sizes, 2).temporary - predict_memory(small, sizes, 2).temporary
    assert more == 2 * 32 * 256 / 2 * (4 + 4)


def test_sequence_parallelism_divides_the_final_norm_and_the_input_of_each_layer():
    sizes = ParallelSizes(tensor=2, recompute=True)
    full, divided = (predict_memory(GPT, replace(sizes, sequence_parallel=sp), 1) for sp in (False, True))
    assert full.activations == 2 * divided.activations
    layers = [layer_activations(GPT, replace(sizes, sequence_parallel=sp)) for sp in (False, True)]
    norm = GPT.last_numbers[0] * 4
    expected = GPT.sequence_length * (layers[0] - layers[1] + norm / 2)
    assert full.temporary - divided.temporary == pytest.approx(expected)


def test_zero_3_holds_the_parameters_of_two_layers_and_the_gradients_of_one_for_a_time():
    zero_2, zero_3 = (predict_memory(GPT, ParallelSizes(data=4, tensor=2, zero=z), 4) for z in (2, 3))
    assert zero_3.temporary - zero_2.temporary == GPT.layer_parameters / 2 * (4 + 4 + 4)


def test_a_context_axis_divides_tokens_and_state():
    one, four = (predict_memory(GPT, ParallelSizes(zero=3, context=context), 1) for context in (1, 4))
    assert one.activations == 4 * four.activations and one.parameters == 4 * four.parameters


@pytest.mark.parametrize("name", ["tiny", "13m"])
def test_more_examples_take_more_activations_and_nothing_else(name: str):
    one, two = (predict_memory(workbook_shape(name), ParallelSizes(), batch) for batch in (1, 2))
    assert two.activations == 2 * one.activations and two.temporary == 2 * one.temporary
    assert two.optimizer_state == one.optimizer_state


def test_microbatches_divide_what_a_step_holds_without_a_pipeline():
    one, four = (predict_memory(GPT, ParallelSizes(data=2, microbatches=m), 8) for m in (1, 4))
    assert 4 * four.activations == one.activations
    assert 4 * four.temporary == one.temporary


def test_an_mlp_holds_inputs_and_output_gradients_of_the_weight_gradients_that_come_later():
    shape = MLPShape(num_layers=8, width=48, inputs=48, outputs=48)
    gpipe, zero_bubble = (
        predict_memory(shape, ParallelSizes(pipeline=2, microbatches=2, schedule=schedule), 16)
        for schedule in ("gpipe", "zb_h1")
    )
    # The last stage does F0 I0 F1 I1 W0 W1: two microbatches then wait for W, each with twice its outputs.
    assert zero_bubble.deferred == gpipe.activations == 2 * 8 * 4 * 48 * 4
    assert zero_bubble.total - zero_bubble.deferred == gpipe.total
