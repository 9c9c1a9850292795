"""The simulator agrees with a clock that ticks second after second, and looks at all ranks each time."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.cost import Link
from lab.trace.gantt import Event, tracks
from pipeline_parallel.actions import Action, Table, parse_row
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.analysis.validate import ScheduleError
from pipeline_parallel.schedules import SCHEDULES, table_of


def tick_by_tick(table: Table, costs: Costs, alpha: int, sizes: list[int]) -> dict[Action, tuple[int, int]]:
    """Return when each action starts and ends, found the slow way. A byte takes a second."""
    ranks = range(len(table))
    rank_of = {action.stage: rank for rank in ranks for action in table[rank]}
    last = max(rank_of)
    to_do = [list(row) for row in table]
    running = [None] * len(table)  # [action, seconds left]
    outbox = [[] for _ in ranks]  # [message, seconds on the link left]; the first is on the link
    flying = []  # [message, seconds of latency left]
    there = set()  # (stage, what, microbatch): what each stage has got or done
    times, now = {}, 0

    def finish(rank: int, kind: str, microbatch: int, stage: int) -> None:
        there.add((stage, kind, microbatch))
        if kind == "B":
            there.add((stage, "I", microbatch))
        to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
        if to is None or not 0 <= to <= last:
            return
        message = (to, "output" if kind == "F" else "gradient", microbatch)
        if rank_of[to] == rank:
            there.add(message)
        else:
            outbox[rank].append([message, sizes[min(stage, to)]])

    def can_start(kind: str, microbatch: int, stage: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage, "output", microbatch) in there
        if kind == "W":
            return (stage, "I", microbatch) in there
        has_gradient = stage == last or (stage, "gradient", microbatch) in there
        return has_gradient and (stage, "F", microbatch) in there

    while any(to_do) or any(running):
        changed = True
        while changed:
            changed = False
            for rank in ranks:
                if running[rank] and running[rank][1] == 0:
                    action, _ = running[rank]
                    running[rank], changed = None, True
                    times[action] = (times[action], now)
                    finish(rank, *action)
                if outbox[rank] and outbox[rank][0][1] == 0:
                    flying.append([outbox[rank].pop(0)[0], alpha])
                    changed = True
                if not running[rank] and to_do[rank] and can_start(*to_do[rank][0]):
                    action = to_do[rank].pop(0)
                    running[rank], changed = [action, int(costs.seconds(action))], True
                    times[action] = now
            for message in [message for message in flying if message[1] == 0]:
                flying.remove(message)
                there.add(message[0])
                changed = True
        now += 1
        for counter in [*filter(None, running), *(box[0] for box in outbox if box), *flying]:
            counter[1] -= 1
    return times


def any_table(ranks: int, stages: int, microbatches: int, seed: int) -> Table:
    """Draw a table that is odd but valid: stages anywhere, actions in any possible order."""
    rng = random.Random(seed)
    rank_of = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(rank_of)
    split = [rng.random() < 0.5 for _ in range(stages)]
    lines = []  # what must come one after the other
    for m in range(microbatches):
        lines.append([Action("F", m, s) for s in range(stages)])
        lines[-1] += [Action("I" if split[s] else "B", m, s) for s in reversed(range(stages))]
    weights = []
    table = [[] for _ in range(ranks)]
    while lines or weights:
        if lines and (not weights or rng.random() < 0.7):
            line = rng.choice(lines)
            action = line.pop(0)
            lines = [line for line in lines if line]
            weights += [action._replace(kind="W")] * (action.kind == "I")
        else:
            action = weights.pop(rng.randrange(len(weights)))
        table[rank_of[action.stage]].append(action)
    return table


@st.composite
def tables(draw) -> Table:
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from([*SCHEDULES, "any"]))
    if schedule != "any":
        return table_of(schedule, ranks, microbatches, chunks)
    return any_table(ranks, ranks * chunks, microbatches, draw(st.integers(0, 10**6)))


def num_stages(table: Table) -> int:
    return 1 + max(action.stage for row in table for action in row)


def some_costs(draw, stages: int, least: int) -> Costs:
    seconds = st.lists(st.integers(least, 4), min_size=stages, max_size=stages).map(tuple)
    return Costs(draw(seconds), draw(seconds), draw(seconds))


def rows_of(*texts: str) -> Table:
    """Stage s on rank s."""
    return [parse_row(text, stage) for stage, text in enumerate(texts)]


def spans(simulation: Simulation) -> list[str]:
    """A line for each rank: each action with its start and end."""
    return [
        " ".join(f"{action.kind}{action.microbatch}:{start:g}-{end:g}" for action, start, end in row)
        for row in simulation.rows
    ]


@settings(max_examples=200)
@given(tables(), st.data())
def test_every_action_starts_and_ends_when_a_ticking_clock_says(table: Table, data):
    stages = num_stages(table)
    costs = some_costs(data.draw, stages, least=0)
    alpha = data.draw(st.integers(0, 4))
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=stages - 1, max_size=stages - 1))

    simulation = simulate(table, costs, Link(alpha, 1), sizes)

    expected = tick_by_tick(table, costs, alpha, sizes)
    assert {action: (start, end) for row in simulation.rows for action, start, end in row} == expected
    assert [[action for action, _, _ in row] for row in simulation.rows] == table
    assert simulation.makespan == max(end for _, end in expected.values())
    busy = [sum(expected[action][1] - expected[action][0] for action in row) for row in table]
    assert simulation.busy == busy
    assert simulation.idle == [simulation.makespan - seconds for seconds in busy]
    if simulation.makespan:
        assert simulation.bubble == pytest.approx(1 - sum(busy) / len(table) / simulation.makespan)


@given(tables(), st.data())
def test_without_a_link_messages_take_no_time(table: Table, data):
    costs = some_costs(data.draw, num_stages(table), least=0)
    expected = simulate(table, costs, Link(0, 0), 1 << 20).rows
    assert simulate(table, costs).rows == simulate(table, costs, None, 1 << 20).rows == expected
    times = tick_by_tick(table, costs, 0, [0] * (num_stages(table) - 1))
    assert {action: (start, end) for row in expected for action, start, end in row} == times


@given(tables(), st.data())
def test_the_peaks_are_those_of_counting_what_is_held_in_every_second(table: Table, data):
    stages = num_stages(table)
    simulation = simulate(table, some_costs(data.draw, stages, least=1), Link(1, 1), 1)
    sizes = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    by_forward, for_weight = data.draw(sizes), data.draw(sizes)
    times = {action: (start, end) for row in simulation.rows for action, start, end in row}

    held, num_bytes = Counter(), Counter()
    for rank, row in enumerate(table):
        for forward in (action for action in row if action.kind == "F"):
            of = {kind: times.get(forward._replace(kind=kind)) for kind in "FBIW"}
            first, last = of["F"][0], (of["B"] or of["I"])[1]
            released = (of["B"] or of["W"])[1]
            for second in range(first, released):
                held[rank, second] += 1
                kept = by_forward if second < last else for_weight
                num_bytes[rank, second] += kept[forward.stage]

    def peak(counted: Counter, rank: int) -> int:
        return max((n for (on, _), n in counted.items() if on == rank), default=0)

    assert simulation.peak_held == [peak(held, rank) for rank in range(len(table))]
    assert simulation.peak_bytes(by_forward, for_weight) == [
        peak(num_bytes, rank) for rank in range(len(table))
    ]


ONE_F_ONE_B = rows_of("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2")
ONES = Costs.equal(2, forward=1, input_gradient=1, weight_gradient=1)


def test_two_ranks_of_1f1b_by_hand():
    simulation = simulate(ONE_F_ONE_B, ONES)
    assert spans(simulation) == [
        "F0:0-1 F1:1-2 B0:4-6 F2:6-7 B1:7-9 B2:10-12",
        "F0:1-2 B0:2-4 F1:4-5 B1:5-7 F2:7-8 B2:8-10",
    ]
    assert simulation.makespan == 12
    assert simulation.busy == [9, 9]
    assert simulation.idle == [3, 3]
    assert simulation.bubble == 0.25
    assert simulation.peak_held == [2, 1]


def test_a_split_backward_lets_the_rank_before_go_on_earlier():
    table = rows_of("F0 I0 W0", "F0 I0 W0")
    assert spans(simulate(table, Costs((1, 1), (2, 3), (4, 5)))) == [
        "F0:0-1 I0:5-7 W0:7-11",
        "F0:1-2 I0:2-5 W0:5-10",
    ]


def test_messages_leave_one_after_the_other_and_computing_goes_on_meanwhile():
    table = rows_of("F0 F1 B0 B1", "F0 F1 B0 B1")
    simulation = simulate(table, ONES, Link(alpha=2, beta=0.5), message_bytes=10)
    # rank 0's messages take the link from 1 to 6 and from 6 to 11, and arrive 2 seconds later
    # rank 1's from 16 to 21 and from 21 to 26
    assert spans(simulation) == [
        "F0:0-1 F1:1-2 B0:23-25 B1:28-30",
        "F0:8-9 F1:13-14 B0:14-16 B1:16-18",
    ]


def test_each_boundary_has_messages_of_its_own_size_both_ways():
    table = rows_of("F0 B0", "F0 B0", "F0 B0")
    costs = Costs.equal(3, 1, 1, 0)
    assert spans(simulate(table, costs, Link(0, 1), [10, 100])) == [
        "F0:0-1 B0:225-226",
        "F0:11-12 B0:214-215",
        "F0:112-113 B0:113-114",
    ]


def test_stages_of_one_rank_hand_over_for_free():
    table = [parse_row("0F0 1F0 1B0 0B0")]
    assert spans(simulate(table, ONES, Link(1000, 1000), 1000)) == ["F0:0-1 F0:1-2 B0:2-4 B0:4-6"]


def test_bytes_by_hand():
    split = simulate(rows_of("F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"), ONES)
    assert split.peak_held == [2, 2]
    assert split.peak_bytes([100, 10], [30, 4]) == [200, 14]
    assert split.peak_bytes([100, 10], [130, 40]) == [230, 80]  # more than before, where it is so much
    whole = simulate(ONE_F_ONE_B, ONES)
    assert whole.peak_bytes([100, 10], [999, 999]) == [200, 10]


def test_fractions_of_seconds_stay_exact():
    third = Fraction(1, 3)
    assert simulate(ONE_F_ONE_B, Costs.equal(2, third, third, third)).makespan == 4


def test_a_table_that_would_never_end_is_refused():
    with pytest.raises(ScheduleError, match="The ranks wait for each other"):
        simulate(rows_of("F0 B0 F1 B1", "F0 F1 B0 B1"), ONES)
    with pytest.raises(ScheduleError, match="Stage 1 never does B0"):
        simulate(rows_of("F0 B0", "F0"), ONES)


def test_costs_and_message_sizes_must_be_those_of_the_tables_stages():
    with pytest.raises(ValueError, match="The table has 2 stages, but the costs are for 3"):
        simulate(ONE_F_ONE_B, Costs.equal(3, 1, 1, 1))
    with pytest.raises(ValueError, match="2 stages have 1 boundaries, not 2: give one size for each"):
        simulate(ONE_F_ONE_B, ONES, Link(1, 1), [1, 1])


def test_events_stand_for_the_actions_in_nanoseconds():
    simulation = simulate(rows_of("F0 B0", "F0 I0 W0"), Costs.equal(2, 0.1, 0.2, 0.3))
    tenth = 100_000_000

    def place(kind: str, stage: int) -> dict[str, str | int]:
        return {"action": kind, "microbatch": 0, "stage": stage, "chunk": 0}

    assert simulation.events() == [
        Event("0", "forward", 0, tenth, args=place("F", 0)),
        Event("0", "backward", 4 * tenth, 5 * tenth, args=place("B", 0)),
        Event("0", "forward", tenth, tenth, args=place("F", 1), rank=1),
        Event("0", "backward", 2 * tenth, 2 * tenth, args=place("I", 1), rank=1),
        Event("0", "weight", 4 * tenth, 3 * tenth, args=place("W", 1), rank=1),
    ]


@given(tables(), st.floats(1e-6, 1.0))
def test_rounding_to_nanoseconds_lets_no_events_of_a_rank_overlap(table: Table, seconds: float):
    events = simulate(table, Costs.equal(num_stages(table), seconds, seconds / 3, seconds / 7)).events()
    for rank in range(len(table)):
        mine = [event for event in events if event.rank == rank]
        assert tracks(mine, nest=False) == [mine]


def test_an_empty_table_takes_no_time():
    assert simulate([], Costs((), (), ())).makespan == simulate([], Costs((), (), ())).bubble == 0
