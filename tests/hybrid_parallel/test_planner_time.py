"""The time model adds up what the lessons' formulas and the simulator say."""

from dataclasses import replace

import pytest

import hybrid_parallel.planner.step_time
from comm import cost
from comm.cost import Link
from context_parallel.makespan import ring_seconds, step_pairs
from context_parallel.sequence_cut import SequenceCut
from hybrid_parallel.planner.machine import MACHINES, Device, Machine, machine_of
from hybrid_parallel.planner.memory import experts_of, parameters_of
from hybrid_parallel.planner.shapes import SHAPES, ModelShape
from hybrid_parallel.planner.step_time import ADAM_BYTES, Seconds, TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.launch.errors import WorkbookError
from lab.launch.threads import own_cores
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import SCHEDULES

# A device of 1 operation per second, whose bytes cost nothing unless a test says so.
CLOCK = Device("clock", 1e12, {"float32": 1.0, "bf16": 1.0}, 1e30, 1.0, 1.0, 1.0, 0.0)
NO_LINK = Link(0.0, 0.0)
FREE = Machine(CLOCK, 8, NO_LINK, NO_LINK)
# Its attention and its head cost almost nothing beside 2 * 12 * 4096 * 4096 operations of a token and layer.
SHAPE = ModelShape(12, 4096, 8, vocab_size=1, sequence_length=1, positions=1)
# One layer; of 8 tokens each of 2 ranks has 4, with 4 numbers in each query, key and value.
TINY = ModelShape(1, width=4, num_heads=2, vocab_size=1, sequence_length=8, num_kv_heads=2)
# One layer. An expert's linear layers have 32 numbers between them, and each token passes two experts.
EXPERTS = ModelShape(1, width=8, num_heads=2, vocab_size=16, sequence_length=4, experts=4, active_experts=2)


def machine(beta: float, alpha: float = 0.0, **changes: object) -> Machine:
    return replace(FREE, inner=Link(alpha, beta), outer=Link(alpha, beta), **changes)


def predict(sizes: ParallelSizes, machine: Machine = FREE, batch: int = 48, shape=SHAPE) -> Seconds:
    return TimeModel(shape, machine, batch).predict(sizes)


def test_one_process_takes_the_operations_of_the_model_over_its_rate():
    for shape in (SHAPE, replace(SHAPE, sequence_length=512, vocab_size=1000), SHAPES["mixtral-8x7b"]):
        seconds = predict(ParallelSizes(), shape=shape)
        assert seconds.total == pytest.approx(48 * shape.sequence_length * shape.flops_per_token(causal=True))
        used = TimeModel(shape, FREE, 48).utilisation(ParallelSizes(), seconds.total, causal=True)
        assert used == pytest.approx(1)


def test_recomputation_adds_a_third_to_the_layers():
    once, again = (predict(ParallelSizes(recompute=recompute)).total for recompute in (False, True))
    assert again / once == pytest.approx(4 / 3, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [3, 6, 12])
def test_the_simulator_and_the_formula_agree_on_equal_stages(schedule, microbatches, monkeypatch):
    sizes = ParallelSizes(pipeline=3, schedule=schedule, chunks=2, microbatches=microbatches)
    simulated = predict(sizes)
    monkeypatch.setattr(hybrid_parallel.planner.step_time, "SIMULATED", 0)
    by_formula = predict(sizes)
    assert simulated.total == pytest.approx(by_formula.total, rel=1e-4)
    assert simulated.bubble == pytest.approx(by_formula.bubble, rel=1e-3)
    assert by_formula.bubble > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_that_of_the_pipeline_lesson(schedule):
    sizes = ParallelSizes(pipeline=4, schedule=schedule, chunks=3, microbatches=8)
    seconds = predict(sizes, shape=replace(SHAPE, num_layers=24))
    third = seconds.compute / 8 / 3
    expected = theory.bubble(schedule, 4, 8, 3, third, third, third)
    assert seconds.bubble / seconds.total == pytest.approx(expected, abs=1e-4)


def test_a_large_head_makes_the_last_stage_the_slowest():
    shape = replace(SHAPE, vocab_size=12 * 4096)
    even, uneven = (predict(ParallelSizes(pipeline=4, microbatches=24), shape=s) for s in (SHAPE, shape))
    # The head is as much work as one layer, so the last of four ranks has four instead of three.
    assert uneven.compute / even.compute == pytest.approx(4 / 3, rel=1e-4)


def test_the_tensor_axis_costs_four_all_reduces_in_each_layer():
    machine = replace(FREE, inner=Link(1.0, 1.0))
    each = cost.seconds("all_reduce", "ring", 48 * 4096 * 4, 4, machine.inner)
    assert predict(ParallelSizes(tensor=4), machine).tensor == pytest.approx(12 * 4 * each)
    # A gather and a scatter send as many bytes as an all-reduce; they have one header more.
    apart = predict(ParallelSizes(tensor=4, sequence_parallel=True), machine).tensor
    assert apart == pytest.approx(12 * 4 * (each + 2 * machine.inner.alpha))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_pipeline_hides_nothing_of_the_data_axis(zero: int):
    machine = replace(FREE, inner=Link(0.0, 1.0), outer=Link(0.0, 1.0))
    sizes = ParallelSizes(pipeline=2, data=4, zero=zero)
    size = max(parameters_of(SHAPE, sizes, rank) for rank in (0, 1)) * 4
    once = cost.seconds("all_gather", "ring", size, 4, machine.inner)
    # An all-reduce is a scatter and a gather; ZeRO 3 gathers in the forward and again in the backward.
    assert predict(sizes, machine).data == pytest.approx((3 if zero == 3 else 2) * once)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_autocast_sends_gradients_and_parameters_in_float32_whatever_it_computes_in(zero: int, pipeline: int):
    machine = replace(FREE, inner=Link(0.0, 1.0), outer=Link(0.0, 1.0))
    sizes = ParallelSizes(pipeline=pipeline, data=4, zero=zero, microbatches=2)

    def seconds(autocast: bool, precision: str) -> float:
        return predict(replace(sizes, precision=precision), replace(machine, autocast=autocast)).data

    assert seconds(True, "bf16") == seconds(True, "float32") == seconds(False, "float32") > 0
    assert seconds(False, "bf16") == pytest.approx(seconds(True, "bf16") / 2, rel=1e-3)


def test_without_a_pipeline_the_backward_hides_all_but_one_layer():
    sizes, fast = ParallelSizes(data=4), Link(0.0, 1e-3)
    exposed = predict(sizes, replace(FREE, inner=fast)).data
    every = cost.seconds("all_reduce", "ring", parameters_of(SHAPE, sizes, 0) * 4, 4, fast)
    assert exposed == pytest.approx(every / 12)


def test_a_link_across_nodes_is_as_fast_as_the_cards_that_the_group_has_in_a_node():
    machine = Machine(CLOCK, 8, Link(1.0, 1.0), Link(5.0, 10.0))
    assert machine.link(8, 1) == machine.link(4, 2) == machine.inner
    assert machine.link(2, 8) == machine.outer
    assert machine.link(16, 4) == Link(5.0, 5.0)
    assert machine.link(64, 1) == Link(5.0, 1.25)


def test_the_optimizers_state_is_read_and_written_by_its_owners_alone():
    machine = replace(FREE, device=replace(CLOCK, bandwidth=1.0))
    numbers = parameters_of(SHAPE, ParallelSizes(), 0)
    assert predict(ParallelSizes(data=4), machine).optimizer == numbers * ADAM_BYTES
    assert predict(ParallelSizes(data=4, zero=1), machine).optimizer == numbers * ADAM_BYTES / 4


def test_this_machine_is_measured_and_shared_by_its_ranks():
    link = Link(1e-4, 8e-9)
    one, many = (machine_of("this", ranks, link) for ranks in (1, 1000))
    assert one.inner == one.outer == link
    assert 1e8 < one.device.flops("float32") < 1e14 and 1e8 < one.device.bytes_per_second < 1e13
    assert one.share == 1 and many.share == len(own_cores()) / 1000
    assert many.device.memory_bytes < one.device.memory_bytes / 1000


def test_an_unknown_device_is_refused_with_those_that_are_known():
    with pytest.raises(WorkbookError, match=r"no device 'v100': choose one of a100-40gb.*this machine"):
        machine_of("v100")
    assert machine_of("h100", 8, Link(1.0, 1.0)).inner == MACHINES["h100"].inner


def predicted(shape: ModelShape, sizes: ParallelSizes, where: Machine, batch: int = 1) -> Seconds:
    return predict(sizes, where, batch, shape)


def test_a_ring_shows_what_is_longer_than_the_attention_to_a_block_and_the_last_gradients():
    # Attention takes 4 * 4 * 8 * 4 / 2 = 256 operations on a rank, 128 for each of two blocks. A message has
    # 4 tokens * 2 * 4 numbers * 4 bytes = 128 bytes.
    ring = ParallelSizes(context=2)
    assert predicted(TINY, ring, machine(2.0)).context == pytest.approx((256 - 128) + (256 - 256) + 256)
    assert predicted(TINY, ring, machine(3.0)).context == pytest.approx((384 - 128) + (384 - 256) + 384)
    assert predicted(TINY, ring, machine(0.5)).context == pytest.approx(64)  # all but the last is hidden


@pytest.mark.parametrize("beta", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_ring_takes_what_the_lesson_predicts_for_the_zigzag_cut(ranks: int, beta: float):
    shape, link = replace(TINY, sequence_length=240), Link(5.0, beta)
    seconds = predicted(shape, ParallelSizes(context=ranks), machine(beta, 5.0))
    pairs = step_pairs(SequenceCut.zigzag(240, ranks))
    per_pair = 4 * shape.query_width
    attention = 3 * 240 / ranks * 240 / 2 * per_pair
    expected = ring_seconds(pairs, per_pair, 240 // ranks * 2 * shape.kv_width * 4, link)
    assert seconds.context + attention == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_to_alls_take_the_bytes_of_the_lessons_formula_and_hide_nothing(ranks: int):
    shape = ModelShape(3, width=64, num_heads=16, vocab_size=1, sequence_length=64, num_kv_heads=8)
    sizes = ParallelSizes(context=ranks, attention="all_to_all")
    tokens, numbers = 64 * 5, shape.query_width + shape.kv_width
    sent = 4 * (ranks - 1) / ranks**2 * tokens * numbers * 4
    assert predicted(shape, sizes, machine(1.0), 5).context == pytest.approx(3 * sent)
    assert predicted(shape, sizes, machine(1e-9), 5).context == pytest.approx(3 * sent * 1e-9)
    again = replace(sizes, recompute=True)  # the forward sends once more
    assert predicted(shape, again, machine(1.0), 5).context == pytest.approx(1.5 * 3 * sent)


def test_a_layer_sends_its_tokens_to_their_experts_and_back_in_both_passes():
    shape, e, batch = replace(EXPERTS, num_layers=3), 2, 8
    tokens = batch * 4 / 4
    exchanges = 4 * (e - 1) / e * tokens * 2 * 8 * 4  # two experts for each token, 8 numbers of 4 bytes
    counts = 3 / 4 * (4 * 4 * 8)  # of 4 experts on 4 ranks, 8 bytes each
    sizes = ParallelSizes(data=4, expert_ranks=e)
    assert predicted(shape, sizes, machine(1.0), batch).experts == pytest.approx(3 * (exchanges + counts))
    again = predicted(shape, replace(sizes, recompute=True), machine(1.0), batch).experts
    assert again == pytest.approx(3 * (1.5 * exchanges + 2 * counts))
    # Without divided experts only the counts are gathered; the rounds of a small gather are log2 n, twice.
    whole = ParallelSizes(data=4)
    assert predicted(shape, whole, machine(1.0), batch).experts == pytest.approx(3 * counts)
    assert predicted(shape, whole, machine(0.0, 1.0), batch).experts == pytest.approx(3 * 4)
    assert predicted(shape, ParallelSizes(), machine(1.0, 1.0), batch).experts == 0


def test_the_replicas_of_an_expert_reduce_its_gradients():
    shape, where = replace(EXPERTS, num_layers=2), machine(1.0)
    for e in (1, 2, 4):
        sizes = ParallelSizes(pipeline=2, data=4, expert_ranks=e)  # a pipeline hides nothing
        own = experts_of(shape, sizes, 0)
        dense = max(parameters_of(shape, sizes, rank) for rank in (0, 1)) - own
        reductions = ((dense, 4), (own, 4 // e))
        expected = sum(cost.seconds("all_reduce", "ring", int(4 * n), r, where.inner) for n, r in reductions)
        assert predicted(shape, sizes, where, 8).data == pytest.approx(expected)


SHARED = replace(SHAPE, tied=False)


def on_cores(cores: int, link: Link, **changes: object) -> Machine:
    return Machine(CLOCK, 4, link, link, cores, **changes)


def test_ranks_share_cores_evenly_and_a_pipeline_fills_its_bubble():
    for sizes in (ParallelSizes(data=4), ParallelSizes(tensor=4)):
        own, shared = (predict(sizes, on_cores(cores, NO_LINK), shape=SHARED) for cores in (4, 2))
        assert shared.compute == pytest.approx(2 * own.compute)
    sizes = ParallelSizes(pipeline=4, microbatches=4)
    own, shared = (predict(sizes, on_cores(cores, NO_LINK), shape=SHARED) for cores in (4, 2))
    assert own.bubble / own.total > 0.4 and 0 < shared.bubble / shared.total < 0.25
    # With one microbatch no two ranks compute at the same time.
    alone = [predict(ParallelSizes(pipeline=4), on_cores(n, NO_LINK), shape=SHARED).total for n in (4, 2)]
    assert alone[0] == pytest.approx(alone[1])
