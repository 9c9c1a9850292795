"""Tables are validated and simulated: every way to break one is named, and the simulator does it by hand.

test_theory.py compares the simulator with all formulas.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm.cost import Link
from lab.trace.gantt import Event
from lab.trace.makespan import makespan, microbatches_held
from pipeline_parallel.actions import Table, as_dependency, dependencies
from pipeline_parallel.analysis import compare
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.analysis.validate import ScheduleError, held, validate
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


def said_of(table: Table) -> list[str]:
    """Return the lines of the error: its sentence, an empty line, and one for each rank."""
    with pytest.raises(ScheduleError) as error:
        validate(table)
    lines = str(error.value).split("\n")
    assert len(lines) == 2 + len(table) and lines[1] == ""
    assert all(line.startswith(f"rank {rank}") for rank, line in enumerate(lines[2:]))
    return [lines[0], *lines[2:]]


def test_swapped_actions_that_deadlock_show_who_waits_for_whom():
    assert said_of(written("F0 B0 F1 B1", "F0 F1 B0 B1", "F0 B0 F1 B1")) == [
        "The ranks wait for each other: 0B0 of rank 0 for 1B0 of rank 1, 1F1 of rank 1 for 0F1 of rank 0.",
        "rank 0   0F0 [0B0] 0F1  0B1   waits for 1B0 of rank 1",
        "rank 1   1F0 [1F1] 1B0  1B1   waits for 0F1 of rank 0",
        "rank 2   2F0  2B0 [2F1] 2B1   waits for 1F1 of rank 1",
    ]


@pytest.mark.parametrize(
    "row, sentence",
    [
        ("F0 B0 F1", "Stage 1 never does B1."),
        ("F0 B0 B1", "Stage 1 never does F1."),
        ("F0 B0", "Stage 1 never does F1 and B1."),
        ("F0 B0 F1 W1", "Stage 1 never does I1."),
        ("F0 B0 F1 B1 W1", "Stage 1 does W1 as well as B1, which contains it."),
        ("F0 B0 F1 F0 B1", "1F0 of rank 1 repeats 1F0 of rank 1."),
        ("F0 B0 F1 I1 W1 B1", "1B1 of rank 1 repeats 1I1 of rank 1."),
        ("B0 F0 F1 B1", "Rank 1 does 1B0 before 1F0, which it needs."),
        ("F0 B0 F1 W1 I1", "Rank 1 does 1W1 before 1I1, which it needs."),
    ],
)
def test_a_broken_row_is_named_and_marked(row: str, sentence: str):
    said = said_of(written("F0 F1 B0 B1", row))
    assert said[0] == sentence
    assert "[" in said[2] or "never does F1 and B1" in sentence
    assert said[2].replace("[", " ").replace("]", " ").split() == ["rank", "1", *map(str, parse_row(row, 1))]


def test_a_stage_on_two_ranks_is_marked_where_it_does_not_belong():
    assert said_of(written("F0 F1 B0", "F0 F1 0B1 B0 B1")) == [
        "Stage 0 is on rank 0 and on rank 1, and has weights on one.",
        "rank 0   0F0  0F1  0B0",
        "rank 1   1F0  1F1 [0B1] 1B0  1B1",
    ]


def test_a_stage_left_out_is_named():
    assert said_of(written("F0 B0", "2F0 2B0"))[0] == "No rank has stage 1."
    assert said_of([[], []]) == ["No rank has stage 0.", "rank 0", "rank 1"]


def test_a_microbatch_is_held_until_its_weight_gradient_has_ended():
    assert list(held(parse_row("F0 I0 F1 W0 B1"))) == [1, 1, 2, 2, 1]


schedule = st.builds(
    table_of, st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3)
)


def comes_to_its_end(table: Table) -> bool:
    """The same question answered without cleverness: look at every rank again until none continues."""
    last = max(action.stage for row in table for action in row)
    left, done = [list(row) for row in table], set()
    goes_on = True
    while goes_on:
        goes_on = False
        for row in left:
            if row and done.issuperset(dependencies(row[0], last)):
                done.add(as_dependency(row.pop(0)))
                goes_on = True
    return not any(left)


@given(schedule, st.data())
def test_any_order_is_accepted_exactly_if_it_comes_to_its_end(table: Table, data: st.DataObject):
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(table))
        i = data.draw(st.integers(0, len(row) - 1))
        row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(i))
    if comes_to_its_end(table):
        validate(table)
    else:
        said_of(table)
