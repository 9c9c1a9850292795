"""On shared cores ranks slow each other down, and none is idle while another one computes."""

from dataclasses import replace

import pytest

from comm import cost
from comm.cost import Link
from hybrid_parallel.planner.machine import Device, Machine
from hybrid_parallel.planner.measured import Handling
from hybrid_parallel.planner.mlp_shape import MLPShape
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.planner.shared_cores import makespan
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.models.model import MLP
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import SCHEDULES, table_of

LINK = Link(0.5, 0.25)
CLOCK = Device("clock", 1e12, {"float32": 1.0}, 1e30, 1.0, 1.0, 1.0, 0.0)
SHAPE = ModelShape(12, 4096, 8, vocab_size=1, sequence_length=1, positions=1, tied=False)


def machine(ranks: int, cores: int, link: Link = LINK, **changes: object) -> Machine:
    return Machine(CLOCK, ranks, link, link, cores, **changes)


def uneven(stages: int) -> Costs:
    return Costs(*(tuple(k + stage % 3 for stage in range(stages)) for k in (2.0, 1.0, 3.0)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_a_core_for_each_rank_the_lessons_simulator_says_the_same(schedule: str):
    table = table_of(schedule, 4, 6, 2)
    costs = uneven(1 + max(action.stage for row in table for action in row))
    none = Costs(*(tuple(0.0 for _ in column) for column in vars(costs).values()))
    alone = simulate(table, costs, LINK, 2).makespan
    # A little less than a core for each rank, so that the events are gone through one by one.
    shared = makespan(table, costs, none, 4 - 1e-9, LINK, 2)
    assert shared == pytest.approx(alone) == pytest.approx(makespan(table, costs, none, 4, LINK, 2))
    assert makespan(table, none, costs, 4 - 1e-9, LINK, 2) == pytest.approx(alone)


def test_one_core_is_never_idle_while_a_rank_can_compute():
    table, none = table_of("naive", 4, 3), Costs.equal(4, 0.0, 0.0, 0.0)
    work = makespan(table, uneven(4), none, 1, Link(0.0, 0.0), 0)
    assert work == pytest.approx(3 * sum(map(sum, vars(uneven(4)).values())))


def test_what_two_ranks_do_at_the_same_time_takes_twice_as_long_on_one_core():
    table, costs, none = table_of("gpipe", 2, 2), Costs.equal(2, 1.0, 1.0, 1.0), Costs.equal(2, 0, 0, 0)
    # Of 9 seconds on two cores, 6 have both ranks at work and 6 one of them, if none waits.
    assert simulate(table, costs).makespan == 9
    assert makespan(table, costs, none, 1, Link(0.0, 0.0), 0) == pytest.approx(12)


def test_waiting_for_a_collective_needs_no_core():
    table, half = table_of("gpipe", 2, 4), Costs.equal(2, 0.5, 0.5, 0.5)
    computing, both = (
        makespan(table, half, w, 1, Link(0.0, 0.0), 0) for w in (Costs.equal(2, 0, 0, 0), half)
    )
    assert computing < both < 2 * computing


@pytest.mark.parametrize("sizes", [ParallelSizes(data=4), ParallelSizes(tensor=4)])
def test_replicas_and_parts_of_layers_share_the_cores_evenly(sizes: ParallelSizes):
    own, shared = (TimeModel(SHAPE, machine(4, cores), 48).predict(sizes) for cores in (4, 2))
    assert shared.compute == pytest.approx(2 * own.compute)


def test_a_pipeline_on_shared_cores_fills_its_bubble():
    sizes = ParallelSizes(pipeline=4, microbatches=4)
    own, shared = (TimeModel(SHAPE, machine(4, n, Link(0.0, 0.0)), 48).predict(sizes) for n in (4, 2))
    assert own.bubble / own.total > 0.4 and 0 < shared.bubble / shared.total < 0.15


def test_the_weights_gradient_hides_the_reduction_of_the_inputs_gradient():
    sizes, slow = ParallelSizes(tensor=4), machine(4, 4, Link(0.0, 1e4))
    each = cost.seconds("all_reduce", "ring", 48 * 4096 * 4, 4, slow.inner)
    shown, hidden = (
        TimeModel(SHAPE, replace(slow, hides_reductions=hides), 48).predict(sizes).tensor for hides in (0, 1)
    )
    assert shown == pytest.approx(12 * 4 * each)
    columns = SHAPE.column_weights * 2 * 48 / 4  # operations of the products that hide it
    assert hidden == pytest.approx(12 * (2 * each + max(0.0, 2 * each - columns)), rel=1e-5)


def test_copies_slow_down_what_hides_the_gradients():
    sizes, one = ParallelSizes(data=4), machine(4, 2, Link(0.0, 1e-3))
    costs = (Handling(), Handling(byte=1e-3))
    more = [TimeModel(SHAPE, replace(one, handling=cost), 48).predict(sizes).data for cost in costs]
    sent = 2 * 3 / 4 * 4 * SHAPE.num_layers * SHAPE.layer_parameters
    assert more[1] - more[0] == pytest.approx(sent * 1e-3 * 2, rel=0.01)


@pytest.mark.parametrize("cores", [4, 2])
def test_a_layers_collectives_need_a_core_for_calls_and_copies_as_a_part_of_their_time(cores: int):
    sizes, one = ParallelSizes(tensor=4), replace(machine(4, cores, Link(0.0, 1e-3)), hides_reductions=False)
    costs = (Handling(), Handling(call=5.0, byte=1e-4))
    without, handled = (TimeModel(SHAPE, replace(one, handling=cost), 48).predict(sizes) for cost in costs)
    of_all = 12 * 4 * (5.0 + 2 * 3 / 4 * 48 * 4096 * 4 * 1e-4)
    assert handled.compute - without.compute == pytest.approx(of_all * 4 / cores)
    assert without.tensor - handled.tensor == pytest.approx(of_all)


def test_an_mlps_shape_has_the_parameters_and_the_operations_of_the_model():
    shape = MLPShape(num_layers=5, width=48, inputs=64, outputs=10)
    model = MLP(shape.sizes)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    # The model keeps up with its formula: the planner leaves nothing out, and adds nothing.
    seconds = TimeModel(shape, machine(1, 1), 32).predict(ParallelSizes())
    reading = seconds.total - 6 * weights * 32
    assert shape.flops_per_token() == 6 * weights and abs(reading) < 1e-6 * seconds.total
