"""Every formula equals the simulator to the last digit where it claims to hold, and not elsewhere."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.schedules import SCHEDULES, V_SHAPED, stages_per_rank, table_of

ALWAYS = [name for name in SCHEDULES if name not in V_SHAPED]  # these have a formula whatever the seconds


def simulated(schedule: str, p: int, m: int, v: int, f: int, i: int, w: int) -> Simulation:
    """The schedule with each rank's seconds shared out evenly, and exactly, among its stages."""
    n = stages_per_rank(schedule, v)
    costs = Costs.equal(n * p, Fraction(f, n), Fraction(i, n), Fraction(w, n))
    return simulate(table_of(schedule, p, m, v), costs)


def formula_beside_simulator(schedule: str, p: int, m: int, v: int, f: int, i: int, w: int) -> None:
    of = (schedule, p, m, v, Fraction(f), Fraction(i), Fraction(w))
    simulation = simulated(schedule, p, m, v, f, i, w)
    assert simulation.makespan == theory.makespan(*of)
    assert simulation.bubble == theory.bubble(*of)
    assert [simulation.makespan - busy for busy in simulation.busy] == [theory.idle(*of)] * p


ranks = st.integers(1, 7)
microbatches = st.integers(1, 20)
chunks = st.integers(1, 4)
seconds = st.integers(0, 9)


@pytest.mark.parametrize("schedule", ALWAYS)
@settings(max_examples=40)
@given(ranks, microbatches, chunks, seconds, seconds, seconds)
def test_a_formula_equals_the_simulator_for_any_numbers(schedule: str, p, m, v, f, i, w):
    formula_beside_simulator(schedule, p, m, v, f, i, w)


@given(ranks, st.integers(0, 10), seconds, seconds, seconds)
def test_zb_vs_formula_equals_the_simulator_where_a_rank_can_be_kept_busy(p, more, f, w, rest):
    i = max(f, w) + rest
    w = max(w, -(-i // 2))
    formula_beside_simulator("zb_v", p, 2 * p - 1 + more, 1, f, i, w)


@given(ranks, st.integers(0, 10), seconds, seconds, seconds)
def test_dualpipe_vs_formula_equals_the_simulator_where_weight_gradients_fill_the_gaps(p, more, w, x, y):
    i = w + x
    formula_beside_simulator("dualpipe_v", p, 2 * p + more, 1, i + min(y, w), i, w)


@given(st.sampled_from(V_SHAPED), ranks, microbatches, seconds)
def test_a_vs_formula_equals_the_simulator_for_equal_times_and_any_number_of_microbatches(name, p, m, each):
    formula_beside_simulator(name, p, m, 1, each, each, each)


def test_dualpipe_v_has_no_formula_exactly_where_the_simulator_contradicts_it():
    p = 3
    for f, i, w in [(a, b, c) for a in range(4) for b in range(5) for c in range(4)]:
        simulation = simulated("dualpipe_v", p, 2 * p, 1, f, i, w)
        holds = simulation.makespan - simulation.busy[0] == Fraction(p - 1, 2) * (f + i - w)
        assert holds == (theory.makespan("dualpipe_v", p, 2 * p, 1, f, i, w) is not None), (f, i, w)
    assert theory.idle("dualpipe_v", p, 2 * p - 1, 1, 2, 2, 1) is None  # one microbatch too few
    simulation = simulated("dualpipe_v", p, 2 * p - 1, 1, 2, 2, 1)
    assert simulation.makespan - simulation.busy[0] > Fraction(p - 1, 2) * 3


def test_zb_v_has_no_formula_exactly_where_the_simulator_contradicts_it():
    p = 3
    for m in (2 * p - 1, 2 * p + 2):
        for f, i, w in [(a, b, c) for a in range(4) for b in range(5) for c in range(4)]:
            simulation = simulated("zb_v", p, m, 1, f, i, w)
            holds = simulation.makespan - simulation.busy[0] == Fraction(p - 1, 2) * i
            assert holds == (theory.makespan("zb_v", p, m, 1, f, i, w) is not None), (m, f, i, w)
    assert theory.bubble("zb_v", p, 2 * p - 1, 1, 2, 1, 1) is None
    assert theory.makespan("zb_v", p, 2 * p - 2, 1, 2, 2, 1) is None  # one microbatch too few
    simulation = simulated("zb_v", p, 2 * p - 2, 1, 2, 2, 1)
    assert simulation.makespan - simulation.busy[0] > p - 1


@given(ranks, microbatches, chunks)
def test_every_rank_holds_at_most_what_the_formula_says_and_so_much_at_some_time(p, m, v):
    for schedule in SCHEDULES:
        expected = [theory.most_held(schedule, p, m, v, rank) for rank in range(p)]
        assert simulated(schedule, p, m, v, 1, 1, 1).peak_held == expected, schedule


def test_the_formulas_agree_with_the_papers_for_many_microbatches():
    p, m, v, f, i, w = 4, 8, 2, 3, 4, 2
    b = i + w

    def idle(schedule: str) -> float:
        return theory.idle(schedule, p, m, v, f, i, w)

    assert idle("gpipe") == idle("1f1b") == (p - 1) * (f + b) == 27
    assert theory.bubble("gpipe", p, m, v, f, i, w) == pytest.approx((p - 1) / (m + p - 1))
    assert idle("interleaved") == (p - 1) * (f + b) / v == 13.5
    assert idle("zb_h1") == (p - 1) * (f + i - w) == 15
    assert theory.makespan("naive", p, m, v, f, i, w) == m * p * (f + b) == 288
    assert theory.idle("zb_v", p, m, v, 2, 2, 2) == (p - 1) * 2 / 2 == 3
