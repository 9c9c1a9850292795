"""The planner's models of memory and time add up what papers, lessons, the simulator and real ranks have."""

from dataclasses import astuple, replace

import pytest
import torch

from comm import cost
from comm.cost import Link
from context_parallel.makespan import ring_seconds, step_pairs
from context_parallel.sequence_cut import SequenceCut
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner.machine import MACHINES, Machine, this_machine
from hybrid_parallel.planner.memory import (
    fullest_ranks,
    layer_activations,
    num_experts_of,
    num_parameters_of,
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
from hybrid_parallel.planner.step_time import Seconds, TimeModel
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.launch.threads import own_cores
from lab.models.model import GPT as Model
from lab.models.model import SIZES, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes, saved_activations
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import SCHEDULES, table_of
from tensor_parallel.traffic import activations_formula
from zero.memory import Held, formula

GPT = ModelShape(256, 32, 8, 8, None, 64, dropout=0.1, fused_attention=False)


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
    numbers = num_parameters_of(GPT, ParallelSizes(), 0)
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
        assert num_parameters_of(EXPERTS, ParallelSizes(data=4, expert_ranks=e), 0) == dense + 4 * expert / e
    both = ParallelSizes(data=2, tensor=2, expert_ranks=2)
    assert num_parameters_of(EXPERTS, both, 0) == dense / 2 + 4 / 2 * expert / 2
    assert num_experts_of(replace(EXPERTS, experts=1, active_experts=1), ParallelSizes(data=2), 0) == 0


WAYS = [
    *(ParallelSizes(data=2, tensor=2, zero=zero) for zero in (1, 2, 3)),
    ParallelSizes(data=4, precision="bf16"),
    ParallelSizes(pipeline=4, microbatches=2),
]


SMALL_CONFIG = GPTConfig.named("tiny", num_layers=4, width=128)
SMALL = ModelShape(**vars(SMALL_CONFIG))


def test_ranks_hold_the_parameters_gradients_and_optimizer_state_that_are_predicted():
    def held(cluster: Cluster) -> list[list[int]]:
        found = []
        for sizes in WAYS:
            tokens = torch.zeros(8 // sizes.data, 33, dtype=torch.int64)
            example = tokens[: len(tokens) // sizes.microbatches, :-1]
            hybrid = put_on_mesh(Model(SMALL_CONFIG), Mesh(cluster, sizes), example)
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
        stages = [rank_memory(SMALL, sizes, 8, rank, autocast=True) for rank in fullest_ranks(sizes)]
        predicted = [(stage.parameters, stage.gradients, stage.optimizer_state) for stage in stages]
        most = [max(each) for each in zip(*of_ranks, strict=True)]
        assert most == pytest.approx([max(each) for each in zip(*predicted, strict=True)], rel=0.1), sizes


# Devices of 1 operation per second, whose bytes cost nothing unless a test says so.
NO_LINK = Link(0.0, 0.0)
FREE = Machine(1e12, {"float32": 1.0, "bf16": 1.0}, 1.0, 1.0, 1e30, 0.0, 8, NO_LINK, NO_LINK)
FOUR = replace(FREE, devices_per_node=4)
# Its attention and its head cost almost nothing beside 2 * 12 * 4096 * 4096 operations of a token and layer.
SHAPE = ModelShape(vocab_size=1, block_size=1, num_layers=12, num_heads=8, width=4096)
# One layer; of 8 tokens each of 2 ranks has 4, with 4 numbers in each query, key and value.
TINY = ModelShape(vocab_size=1, block_size=8, num_layers=1, num_heads=2, width=4)
# One layer. An expert's linear layers have 32 numbers between them, and each token passes two experts.
EXPERTS = ModelShape(16, 4, 1, 2, None, 8, experts=4, active_experts=2)


def machine(beta: float, alpha: float = 0.0, **changes: object) -> Machine:
    return replace(FREE, inner=Link(alpha, beta), outer=Link(alpha, beta), **changes)


def predict(sizes: ParallelSizes, machine: Machine = FREE, batch: int = 48, shape=SHAPE) -> Seconds:
    return TimeModel(shape, machine, batch).predict(sizes)


def test_one_process_takes_the_operations_of_the_model_over_its_rate():
    for shape in (SHAPE, replace(SHAPE, block_size=512, vocab_size=1000), SHAPES["mixtral-8x7b"]):
        seconds = predict(ParallelSizes(), shape=shape)
        assert seconds.total == pytest.approx(48 * shape.block_size * flops_per_token(shape, causal=True))
        used = TimeModel(shape, FREE, 48).utilisation(ParallelSizes(), seconds.total, causal=True)
        assert used == pytest.approx(1)


def test_recomputation_adds_a_third_to_the_layers():
    once, again = (predict(ParallelSizes(recompute=recompute)).total for recompute in (False, True))
    assert again / once == pytest.approx(4 / 3, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [3, 12])
def test_a_pipeline_takes_as_long_as_in_the_simulator(schedule, microbatches):
    sizes, link = ParallelSizes(pipeline=3, schedule=schedule, microbatches=microbatches), Link(0.0, 1e-3)
    of_layer = predict(ParallelSizes(microbatches=microbatches)).compute / 12 / 3 / microbatches
    costs = Costs.equal(sizes.num_stages, *[12 / sizes.num_stages * of_layer] * 3)
    size = 48 / microbatches * 4096 * 4
    for one, message in ((NO_LINK, 0), (link, round(size))):
        table = table_of(schedule, 3, microbatches, 2)
        simulated = simulate(table, costs, Link(0.0, one.beta), message).makespan
        predicted = predict(sizes, replace(FREE, inner=one))
        assert predicted.total == pytest.approx(simulated, rel=0.02 if message else 1e-4)
        assert predicted.bubble > 0 and (predicted.messages > 0) == (message > 0)


def test_a_large_head_makes_the_last_stage_the_slowest():
    shape = replace(SHAPE, vocab_size=12 * 4096)
    even, uneven = (predict(ParallelSizes(pipeline=4, microbatches=24), shape=s) for s in (SHAPE, shape))
    # The head is as much work as one layer, so the last of four ranks has four instead of three.
    assert uneven.compute / even.compute == pytest.approx(4 / 3, rel=1e-4)


def test_the_tensor_axis_costs_four_all_reduces_in_each_layer():
    machine = replace(FREE, inner=Link(1.0, 1.0))
    each = cost.seconds_of_trees("all_reduce", 48 * 4096 * 4, 4, 1, machine.inner, machine.inner)
    assert predict(ParallelSizes(tensor=4), machine).tensor == pytest.approx(12 * 4 * each)
    # A gather and a scatter take as long as an all-reduce.
    apart = predict(ParallelSizes(tensor=4, sequence_parallel=True), machine).tensor
    assert apart == pytest.approx(12 * 4 * each)


def test_small_all_reduces_take_as_long_as_nccl_took_and_their_time_grows_with_the_logarithm():
    """Microseconds for 8 bytes on nodes of 8 H100s: Smol Training Playbook, Hugging Face, 2025."""
    measured = {1: 12.9, 2: 64.3, 4: 128.7, 8: 201.6, 16: 265.8}
    machine = MACHINES["h100"]
    for nodes, microseconds in measured.items():
        link = machine.ring_link(8 * nodes, 1)
        predicted = cost.seconds_of_trees("all_reduce", 8, 8 * nodes, nodes, machine.inner, link)
        assert predicted == pytest.approx(microseconds / 1e6, rel=0.2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_pipeline_hides_nothing_of_the_data_axis(zero: int):
    machine = replace(FREE, inner=Link(0.0, 1.0), outer=Link(0.0, 1.0))
    sizes = ParallelSizes(pipeline=2, data=4, zero=zero)
    size = max(num_parameters_of(SHAPE, sizes, rank) for rank in (0, 1)) * 4
    once = cost.seconds("all_gather", "ring", size, 4, machine.inner)
    # An all-reduce is a scatter and a gather; ZeRO 3 gathers in the forward and again in the backward.
    assert predict(sizes, machine).data == pytest.approx((3 if zero == 3 else 2) * once)


def test_without_a_pipeline_the_backward_hides_all_but_one_layer():
    sizes, fast = ParallelSizes(data=4), Link(0.0, 1e-3)
    exposed = predict(sizes, replace(FREE, inner=fast)).data
    every = cost.seconds("all_reduce", "ring", num_parameters_of(SHAPE, sizes, 0) * 4, 4, fast)
    assert exposed == pytest.approx(every / 12)


def test_this_machine_is_measured_and_shared_by_its_ranks():
    link = Link(1e-4, 8e-9)
    one, many = (this_machine(ranks, link) for ranks in (1, 1000))
    assert one.inner == one.outer == link
    assert 1e8 < one.peak_flops["float32"] < 1e14 and 1e8 < one.bandwidth < 1e13
    assert one.share == 1 and many.share == len(own_cores()) / 1000
    assert many.memory_bytes < one.memory_bytes / 1000


@pytest.mark.parametrize("beta", [0.01, 10.0])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_ring_takes_what_the_lesson_predicts_for_the_zigzag_cut(ranks: int, beta: float):
    shape, link = replace(TINY, block_size=240), Link(5.0, beta)
    seconds = predict(ParallelSizes(context=ranks), machine(beta, 5.0), 1, shape)
    pairs = step_pairs(SequenceCut.zigzag(240, ranks))
    per_pair = 4 * shape.width
    attention = 3 * 240 / ranks * 240 / 2 * per_pair
    expected = ring_seconds(pairs, per_pair, 240 // ranks * 2 * shape.kv_width * 4, link)
    assert seconds.context + attention == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_to_alls_take_the_bytes_of_the_lessons_formula_and_hide_nothing(ranks: int):
    shape = ModelShape(1, 64, num_layers=3, num_heads=16, num_kv_heads=8, width=64)
    sizes = ParallelSizes(context=ranks, attention="all_to_all")
    tokens, numbers = 64 * 5, shape.width + shape.kv_width
    sent = 4 * (ranks - 1) / ranks**2 * tokens * numbers * 4
    assert predict(sizes, machine(1.0), 5, shape).context == pytest.approx(3 * sent)
    assert predict(sizes, machine(1e-9), 5, shape).context == pytest.approx(3 * sent * 1e-9)
    again = replace(sizes, recompute=True)  # the forward sends once more
    assert predict(again, machine(1.0), 5, shape).context == pytest.approx(1.5 * 3 * sent)


def test_a_layer_sends_its_tokens_to_their_experts_and_back_in_both_passes():
    shape, e, batch = replace(EXPERTS, num_layers=3), 2, 8
    tokens = batch * 4 / 4
    exchanges = 4 * (e - 1) / e * tokens * 2 * 8 * 4  # two experts for each token, 8 numbers of 4 bytes
    sizes = ParallelSizes(data=4, expert_ranks=e)
    assert predict(sizes, machine(1.0), batch, shape).experts == pytest.approx(3 * exchanges)
    again = predict(replace(sizes, recompute=True), machine(1.0), batch, shape).experts
    assert again == pytest.approx(3 * 1.5 * exchanges)
    assert predict(ParallelSizes(data=4), machine(1.0), batch, shape).experts == 0


def test_ranks_share_cores_evenly_and_a_pipeline_fills_its_bubble():
    def on_4_and_on_2_cores(**sizes: int) -> list[Seconds]:
        shape = replace(SHAPE, tied=False)
        return [predict(ParallelSizes(**sizes), replace(FOUR, cores=n), shape=shape) for n in (4, 2)]

    for axis in ("data", "tensor"):
        own, shared = on_4_and_on_2_cores(**{axis: 4})
        assert shared.compute == pytest.approx(2 * own.compute)
    own, shared = on_4_and_on_2_cores(pipeline=4, microbatches=4)
    assert own.bubble / own.total > 0.4 and 0 < shared.bubble / shared.total < 0.25
    # With one microbatch no two ranks compute at the same time.
    own, shared = on_4_and_on_2_cores(pipeline=4)
    assert own.total == pytest.approx(shared.total)
