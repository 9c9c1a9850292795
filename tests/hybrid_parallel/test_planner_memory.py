"""The planner's shapes and its memory model count what papers, lessons, models and real ranks have."""

from dataclasses import astuple, replace

import pytest
import torch

from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner.memory import (
    experts_of,
    fullest_ranks,
    layer_activations,
    parameters_of,
    predict_memory,
    rank_memory,
)
from hybrid_parallel.planner.shapes import (
    SHAPES,
    ModelShape,
    flops_per_token,
    num_parameters,
    shape_of,
)
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.models.model import GPT as Model
from lab.models.model import SIZES, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes, saved_activations
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import SCHEDULES, table_of
from tensor_parallel.expected_traffic import activations_formula
from zero.memory import Held, formula

GPT = ModelShape(256, 32, 8, 8, None, 64, dropout=0.1, fused_attention=False)
EXPERTS = ModelShape(16, 4, 1, 2, None, 8, experts=4, active_experts=2)


def test_a_shape_has_the_weights_of_the_real_model():
    def weights(model: torch.nn.Module) -> int:
        return sum(
            p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "position" not in name
        )

    for name, config in SIZES.items():
        assert weights(Model(config)) == num_parameters(shape_of(name))
    # Of the model cards: Meta-Llama-3-8B and so on.
    published = {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496}
    published |= {"llama-3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704}
    assert {name: num_parameters(SHAPES[name]) for name in published} == pytest.approx(published, rel=1e-4)


def test_operations_are_those_of_the_formula_in_the_megatron_paper():
    shape = ModelShape(51_200, 2048, 48, 64, None, 8192)
    s, h, n, v = shape.block_size, shape.width, shape.num_layers, shape.vocab_size
    assert flops_per_token(shape) == pytest.approx(72 * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_layers_activations_are_those_of_korthikantis_equations_2_and_4(
    ranks: int, sequence_parallel: bool
):
    config = GPTConfig(256, 32, num_layers=1, num_heads=8, width=64)
    sizes = ParallelSizes(tensor=ranks, sequence_parallel=sequence_parallel, precision="bf16")
    expected = activations_formula(config, 3, ranks, sequence_parallel)
    assert 3 * 32 * layer_activations(GPT, sizes) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["small", "24heads"])
def test_predicted_activations_are_within_5_percent_of_what_a_forward_holds_at_its_end(name: str):
    gpt = Model(SIZES[name])
    tokens = torch.randint(0, 256, (4, SIZES[name].block_size))
    with saved_activations(gpt.parameters) as saved:
        logits = gpt(tokens)
        loss_of(logits, tokens)
    predicted = predict_memory(shape_of(name), ParallelSizes(), 4)
    held = predicted.activations + predicted.temporary_tensors
    assert held == pytest.approx(saved.bytes + logits.nbytes, rel=0.05)


@pytest.mark.parametrize("zero", range(4))
def test_the_state_of_a_rank_is_the_papers_table(zero: int):
    held = predict_memory(GPT, ParallelSizes(data=4, zero=zero, precision="bf16"), 4)
    numbers = parameters_of(GPT, ParallelSizes(), 0)
    expected = formula(zero, Held(2 * numbers, 2 * numbers, 12 * numbers), 4)
    assert (held.parameters, held.gradients, held.optimizer_state) == astuple(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_activations_of_a_pipeline_are_those_that_the_simulator_counts(schedule: str):
    shape = replace(GPT, num_layers=16, vocab_size=1, tied=False)  # the ranks hold almost equal parameters
    for microbatches in (1, 4, 9):
        sizes = ParallelSizes(pipeline=4, schedule=schedule, chunks=2, microbatches=microbatches)
        predicted = predict_memory(shape, sizes, microbatches).activations
        timeline = simulate(table_of(schedule, 4, microbatches, 2), Costs.equal(sizes.num_stages, 1, 1, 1))
        layer = shape.block_size * layer_activations(shape, sizes)
        stage = round(layer * shape.num_layers / sizes.num_stages)
        assert predicted == max(stage * count for count in timeline.peak_held)


def test_recomputation_keeps_the_input_of_each_layer_and_one_layer_more():
    sizes = ParallelSizes(precision="bf16")
    kept, again = (predict_memory(GPT, replace(sizes, recompute=r), 1) for r in (False, True))
    of_layer = kept.activations / GPT.num_layers
    assert again.activations == GPT.num_layers * GPT.block_size * GPT.width * 2
    assert again.temporary_tensors - kept.temporary_tensors == of_layer


def test_microbatches_divide_what_a_step_holds_without_a_pipeline():
    one, four = (predict_memory(GPT, ParallelSizes(data=2, microbatches=m), 8) for m in (1, 4))
    assert 4 * four.activations == one.activations
    assert 4 * four.temporary_tensors == one.temporary_tensors


def test_expert_ranks_divide_experts_and_nothing_else():
    # Attention has 4 * 8 * 8 weights, an expert 2 * 8 * 32, and the embedding 16 * 8.
    dense, expert = 256 + 128, 512
    for e in (1, 2, 4):
        assert parameters_of(EXPERTS, ParallelSizes(data=4, expert_ranks=e), 0) == dense + 4 * expert / e
    both = ParallelSizes(data=2, tensor=2, expert_ranks=2)
    assert parameters_of(EXPERTS, both, 0) == dense / 2 + 4 / 2 * expert / 2
    assert experts_of(replace(EXPERTS, experts=1, active_experts=1), ParallelSizes(data=2), 0) == 0


WAYS = [
    *(ParallelSizes(data=2, tensor=2, zero=zero) for zero in (1, 2, 3)),
    ParallelSizes(data=4, precision="bf16"),
    ParallelSizes(pipeline=4, microbatches=2),
]


CONFIG = GPTConfig.named("tiny", num_layers=4, width=128)
SHAPE = ModelShape(**vars(CONFIG))


def test_ranks_hold_the_parameters_gradients_and_optimizer_state_that_are_predicted():
    def held(cluster: Cluster) -> list[list[int]]:
        found = []
        for sizes in WAYS:
            tokens = torch.zeros(8 // sizes.data, 33, dtype=torch.int64)
            example = tokens[: len(tokens) // sizes.microbatches, :-1]
            hybrid = put_on_mesh(Model(CONFIG), Mesh(cluster, sizes), example)
            hybrid.optimizer.zero_grad()
            hybrid.backward(tokens[:, :-1], tokens[:, 1:])
            [group] = hybrid.optimizer.param_groups
            parameters = [*hybrid.plain.parameters(), *group["params"]]
            gradients = live_bytes({"gradients": [each.grad for each in parameters]})["gradients"]
            hybrid.optimizer.step()
            state = [tensor for each in hybrid.optimizer.state.values() for tensor in each.values()]
            by_class = live_bytes({"optimizer": state, "parameters": parameters})
            found.append([by_class["parameters"], gradients, by_class["optimizer"]])
        return found

    for sizes, *of_ranks in zip(WAYS, *run_ranks(held, 4), strict=True):
        stages = [rank_memory(SHAPE, sizes, 8, rank, autocast=True) for rank in fullest_ranks(sizes)]
        predicted = [(stage.parameters, stage.gradients, stage.optimizer_state) for stage in stages]
        most = [max(each) for each in zip(*of_ranks, strict=True)]
        assert most == pytest.approx([max(each) for each in zip(*predicted, strict=True)], rel=0.1), sizes
