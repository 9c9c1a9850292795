"""The time model adds up what the lessons' formulas and the simulator say."""

from dataclasses import replace

import pytest

import hybrid_parallel.planner.time_model
from comm import cost
from comm.cost import Link
from hybrid_parallel.planner.machine import MACHINES, Device, Machine, machine_of
from hybrid_parallel.planner.memory_model import parameters_of
from hybrid_parallel.planner.replica_time import ADAM_BYTES
from hybrid_parallel.planner.seconds import Seconds
from hybrid_parallel.planner.shapes import SHAPES, ModelShape
from hybrid_parallel.planner.time_model import TimeModel
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


def predict(sizes: ParallelSizes, machine: Machine = FREE, batch: int = 48, shape=SHAPE) -> Seconds:
    return TimeModel(shape, machine, batch).predict(sizes)


def test_one_process_takes_the_operations_of_the_model_over_its_rate():
    for shape in (SHAPE, replace(SHAPE, sequence_length=512, vocab_size=1000), SHAPES["mixtral-8x7b"]):
        seconds = predict(ParallelSizes(), shape=shape)
        assert seconds.total == pytest.approx(48 * shape.sequence_length * shape.flops_per_token(causal=True))
        used = TimeModel(shape, FREE, 48).utilisation(ParallelSizes(), seconds.total, causal=True)
        assert used == pytest.approx(1)


def test_attention_without_a_fused_kernel_computes_all_scores_and_moves_them():
    shape = replace(SHAPE, sequence_length=512, fused_attention=False)
    seconds = predict(ParallelSizes(), shape=shape).total
    assert seconds == pytest.approx(48 * 512 * shape.flops_per_token(causal=False))
    slow_memory = replace(FREE, device=replace(CLOCK, bandwidth=1.0))
    fused = replace(shape, fused_attention=True)
    more = predict(ParallelSizes(), slow_memory, shape=shape).compute - seconds
    less = (
        predict(ParallelSizes(), slow_memory, shape=fused).compute
        - predict(ParallelSizes(), shape=fused).total
    )
    # Written, read and written by the softmax, and read: 4 times 4 bytes in each of three passes.
    assert more - less == pytest.approx(3 * 48 * 512 * 12 * 8 * 512 * 4 * 4)


def test_recomputation_adds_a_third_to_the_layers():
    once, again = (predict(ParallelSizes(recompute=recompute)).total for recompute in (False, True))
    assert again / once == pytest.approx(4 / 3, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [3, 6, 12])
def test_the_simulator_and_the_formula_agree_on_equal_stages(schedule, microbatches, monkeypatch):
    sizes = ParallelSizes(pipeline=3, schedule=schedule, chunks=2, microbatches=microbatches)
    simulated = predict(sizes)
    monkeypatch.setattr(hybrid_parallel.planner.time_model, "SIMULATED", 0)
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


def test_a_message_between_stages_goes_as_shards_and_is_gathered_within_a_node(monkeypatch):
    monkeypatch.setattr(hybrid_parallel.planner.time_model, "SIMULATED", 0)
    machine = replace(FREE, outer=Link(0.0, 1.0), devices_per_node=2)
    numbers = 8 * 4096  # of a microbatch
    sizes, shape = ParallelSizes(pipeline=4, tensor=2, microbatches=6), replace(SHAPE, tied=False)
    assert predict(sizes, machine, shape=shape).messages == pytest.approx(2 * 6 * numbers * 4 / 2)
    interleaved = replace(sizes, schedule="interleaved", chunks=3)
    assert predict(interleaved, machine, shape=shape).messages == pytest.approx(3 * 2 * 6 * numbers * 4 / 2)


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


def test_the_overhead_is_a_share_of_the_step():
    machine = replace(FREE, device=replace(CLOCK, overhead=0.2))
    seconds = predict(ParallelSizes(), machine)
    assert seconds.overhead / seconds.total == pytest.approx(0.2)


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


def test_each_layer_of_the_data_axis_has_messages_of_its_own():
    machine = replace(FREE, inner=Link(1.0, 0.0))
    once = cost.seconds("all_gather", "ring", 1, 4, machine.inner)
    assert predict(ParallelSizes(pipeline=2, data=4, zero=1), machine).data == pytest.approx(2 * 6 * once)
