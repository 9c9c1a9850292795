"""The simulator does what one does by hand; test_theory.py compares it with all formulas."""

import pytest

from comm.cost import Link
from lab.trace.gantt import Event
from lab.trace.makespan import makespan, microbatches_held
from pipeline_parallel.analysis import compare
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.analysis.validate import ScheduleError
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank, table_of
from tests.pipeline_parallel.rows import parse_row, written


def spans(simulation: Simulation) -> list[str]:
    """A line for each rank: each action with its start and end."""
    return [
        " ".join(f"{action.kind}{action.microbatch}:{start:g}-{end:g}" for action, start, end in row)
        for row in simulation.rows
    ]


ONE_F_ONE_B = written("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2")
ONES = Costs.equal(2, forward=1, input_gradient=1, weight_gradient=1)


def test_two_ranks_of_1f1b_by_hand():
    simulation = simulate(ONE_F_ONE_B, ONES)
    assert spans(simulation) == [
        "F0:0-1 F1:1-2 B0:4-6 F2:6-7 B1:7-9 B2:10-12",
        "F0:1-2 B0:2-4 F1:4-5 B1:5-7 F2:7-8 B2:8-10",
    ]
    assert simulation.makespan == 12
    assert simulation.busy == [9, 9]
    assert simulation.bubble == 0.25
    assert simulation.peak_held == [2, 1]


def test_messages_leave_one_after_the_other_and_computing_goes_on_meanwhile():
    table = written("F0 F1 B0 B1", "F0 F1 B0 B1")
    simulation = simulate(table, ONES, Link(alpha=2, beta=0.5), message_bytes=10)
    # rank 0's messages take the link from 1 to 6 and from 6 to 11, and arrive 2 seconds later
    # rank 1's from 16 to 21 and from 21 to 26
    assert spans(simulation) == [
        "F0:0-1 F1:1-2 B0:23-25 B1:28-30",
        "F0:8-9 F1:13-14 B0:14-16 B1:16-18",
    ]


def test_messages_go_both_ways_and_stages_of_one_rank_have_none():
    table = written("F0 B0", "F0 B0", "F0 B0")
    assert spans(simulate(table, Costs.equal(3, 1, 1, 0), Link(0, 1), 10)) == [
        "F0:0-1 B0:45-46",
        "F0:11-12 B0:34-35",
        "F0:22-23 B0:23-24",
    ]
    table = [parse_row("0F0 1F0 1B0 0B0")]
    assert spans(simulate(table, ONES, Link(1000, 1000), 1000)) == ["F0:0-1 F0:1-2 B0:2-4 B0:4-6"]


def test_a_table_that_would_never_end_is_refused():
    with pytest.raises(ScheduleError, match="The ranks wait for each other"):
        simulate(written("F0 B0 F1 B1", "F0 F1 B0 B1"), ONES)
    with pytest.raises(ScheduleError, match="Stage 1 never does B0"):
        simulate(written("F0 B0", "F0"), ONES)


def test_of_a_simulated_run_the_table_its_costs_and_what_it_holds_come_back():
    costs = Costs(forward=(1.0, 2.0), input_gradient=(1.0, 3.0), weight_gradient=(1.0, 3.0))
    for name in SCHEDULES:
        stages = 2 * stages_per_rank(name)
        table = table_of(name, 2, 4)
        used = costs if stages == 2 else Costs.equal(4, 1.0, 2.0, 2.0)
        events: list[Event] = simulate(table, used).events()
        assert Simulation.measured(events).table == table
        assert compare.name_of(table) == name
        assert Costs.measured(events, stages) == used
        assert makespan(events) == simulate(table, used).makespan
        assert [microbatches_held(events, rank) for rank in range(2)] == simulate(table, used).peak_held
