"""The tables equal those written by hand and those of torch, and are valid for any numbers."""

import itertools
import re
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline_parallel import (
    train_1f1b,
    train_1f1b_by_hand,
    train_afab,
    train_interleaved,
    train_model_parallel,
    train_zero_bubble,
)
from pipeline_parallel.actions import Action, Table, placement
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.analysis.validate import held, validate
from pipeline_parallel.schedules import (
    clock_cycles,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tests.pipeline_parallel.rows import written

SIZES = [(p, m) for p in range(1, 5) for m in range(1, 10)]
some_ranks, some_microbatches, some_chunks = st.integers(1, 7), st.integers(1, 24), st.integers(1, 4)


def in_torchs_tables(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """Return torch's own table where ranks have several stages; torch asks the stages for numbers only."""
    stages = [
        mock.Mock(group_size=ranks, group_rank=0, num_stages=chunks * ranks, stage_index=i * ranks)
        for i in range(chunks)
    ]
    order = get_schedule_class(name)(stages, microbatches).pipeline_order
    return [
        [
            Action(a.computation_type.value, a.microbatch_index, a.stage_index)
            for pair in order[rank]
            if pair is not None
            for a in pair.sub_actions or [pair]
        ]
        for rank in range(ranks)
    ]


def test_gpipe_does_all_forwards_and_then_all_backwards_in_the_same_order():
    assert gpipe(2, 3) == written("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2")


def test_1f1b_warms_up_less_on_each_further_rank():
    assert one_f_one_b(3, 4) == written(
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    )
    assert one_f_one_b(4, 2) == written("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1")


def test_interleaved_goes_through_its_chunks_round_by_round():
    assert interleaved_1f1b(2, 4, chunks=2) == written(
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    )


def test_interleaved_puts_what_the_ranks_do_not_divide_into_the_first_rounds():
    first = [action.microbatch for action in interleaved_1f1b(4, 11)[3] if action.kind == "F"]
    assert first == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 6, 7, 8, 9, 10]


def test_zb_h1_puts_off_the_weight_gradients_by_as_many_backwards_as_the_ranks_number():
    assert zb_h1(3, 4) == written(
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    )


@given(some_ranks, some_microbatches)
def test_clock_cycles_are_gpipes_forwards_as_soon_as_they_can_be(stages: int, microbatches: int):
    ticks = list(clock_cycles(microbatches, stages))
    assert len(ticks) == microbatches + stages - 1
    for stage, row in enumerate(gpipe(stages, microbatches)):
        forwards = [(action.microbatch, stage) for action in row if action.kind == "F"]
        assert [pair for tick in ticks for pair in tick if pair[1] == stage] == forwards
        assert [i for i, tick in enumerate(ticks) if stage in dict(map(reversed, tick))] == [
            stage + microbatch for microbatch, _ in forwards
        ]


def drawn(table: Table) -> list[str]:
    """Return a picture's row for each rank: three characters for the time of a forward, an I or a W."""
    rows = []
    timeline = simulate(table, Costs.equal(1 + max(action.stage for row in table for action in row), 1, 1, 1))
    for row in timeline.rows:
        cells = [".  "] * round(timeline.makespan)
        for (kind, microbatch, stage), start, end in row:
            letter = kind if stage < len(table) else kind.lower()
            cells[round(start)] = f"{letter}{microbatch} " if end - start == 1 else f"{letter}{microbatch}-"
            cells[round(start) + 1 : round(end)] = ["-- "] * round(end - start - 1)
        rows.append("".join(cells).rstrip())
    return rows


PICTURES = {
    **{
        schedule.__name__: (schedule, schedule.__doc__)
        for schedule in (naive, gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v, dualpipe_v)
    },
    "train_model_parallel": (naive, train_model_parallel.__doc__),
    "train_afab": (gpipe, train_afab.__doc__),
    "train_1f1b_by_hand": (one_f_one_b, train_1f1b_by_hand.__doc__),
    "train_1f1b": (one_f_one_b, train_1f1b.__doc__),
    "train_interleaved": (interleaved_1f1b, train_interleaved.__doc__),
    "train_zero_bubble": (zb_h1, train_zero_bubble.__doc__),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_show_when_each_action_starts_and_ends(name: str):
    schedule, text = PICTURES[name]
    rows = re.findall(r"^ +rank \d   (.*?)(?: {5,}.*)?$", text or "", re.MULTILINE)
    microbatches = 1 + max(int(digit) for digit in re.findall(r"[FBIW](\d)", "".join(rows), re.IGNORECASE))
    assert rows == drawn(schedule(len(rows), microbatches))


def test_interleaved_is_torchs_wherever_torch_has_one():
    is_torchs("Interleaved1F1B", interleaved_1f1b, chunks=(1, 2, 3))


def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank():
    is_torchs("InterleavedZeroBubble", lambda ranks, microbatches, chunks: zb_h1(ranks, microbatches), (1,))


def is_torchs(name: str, ours: Callable[[int, int, int], Table], chunks: tuple[int, ...]) -> None:
    """Compare with torch's table, which wants rounds of one size; those of ours differ by one."""
    for (ranks, microbatches), each in itertools.product(SIZES, chunks):
        if microbatches % max(1, microbatches // ranks):
            with pytest.raises(ValueError):
                in_torchs_tables(name, ranks, microbatches, each)
        else:
            assert ours(ranks, microbatches, each) == in_torchs_tables(name, ranks, microbatches, each)


def test_zb_v_is_torchs():
    for ranks, microbatches in SIZES:
        assert zb_v(ranks, microbatches) == in_torchs_tables("ZBVZeroBubble", ranks, microbatches, 2)


def test_dualpipe_v_is_torchs_with_a_pair_as_its_forward_and_then_its_backward():
    for ranks, microbatches in itertools.product(range(1, 7), range(1, 20)):
        if microbatches < 2 * ranks:
            with pytest.raises(ValueError, match="at least as many microbatches as stages"):
                in_torchs_tables("DualPipeV", ranks, microbatches, 2)
        else:
            assert dualpipe_v(ranks, microbatches) == in_torchs_tables("DualPipeV", ranks, microbatches, 2)


@given(some_ranks, some_microbatches)
def test_schedules_with_one_stage_a_rank_are_valid_and_hold_what_they_say(p: int, m: int):
    for make, most in (
        (naive, [1] * p),
        (gpipe, [m] * p),
        (one_f_one_b, [min(m, p - rank) for rank in range(p)]),
        (zb_h1, [min(m, p)] * p),
    ):
        validate(make(p, m))
        assert [max(held(row)) for row in make(p, m)] == most


@given(some_ranks, some_microbatches, some_chunks)
def test_interleaved_is_valid_and_holds_its_warmup_and_one(p: int, m: int, chunks: int):
    table = interleaved_1f1b(p, m, chunks)
    largest_round = -(-m // max(1, m // p))
    bound = [(chunks - 1) * largest_round + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    validate(table)
    assert [max(held(row)) for row in table] == [min(chunks * m, most) for most in bound]
    assert placement(table) == {stage: stage % p for stage in range(chunks * p)}


@given(some_ranks, some_microbatches)
def test_zb_v_is_valid_and_holds_as_much_everywhere_as_1f1b_on_rank_0(p: int, m: int):
    table = zb_v(p, m)
    validate(table)
    most = [max(held(row)) for row in table]
    assert most == [2 * p] * p if m >= 2 * p - 1 else max(most) <= 2 * p
    assert placement(table) == {stage: min(stage, 2 * p - 1 - stage) for stage in range(2 * p)}


@given(some_ranks, some_microbatches)
def test_dualpipe_v_is_valid_on_the_ranks_of_zb_v_and_holds_one_more(p: int, m: int):
    table = dualpipe_v(p, m)
    validate(table)
    most = [max(held(row)) for row in table]
    assert most == [2 * p + 1] * p if m >= 2 * p else max(most) <= 2 * p + 1
    assert placement(table) == placement(zb_v(p, m))


def test_what_cannot_be_scheduled_is_said_in_a_sentence():
    for function in (naive, gpipe, one_f_one_b, zb_h1):
        with pytest.raises(ValueError, match="number of stages must be at least 1, not 0"):
            function(0, 1)
    for function in (interleaved_1f1b, zb_v, dualpipe_v):
        with pytest.raises(ValueError, match="number of ranks must be at least 1, not 0"):
            function(0, 1)
    for function in (naive, gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v, dualpipe_v):
        with pytest.raises(ValueError, match="number of microbatches must be at least 1, not -1"):
            function(2, -1)
    with pytest.raises(ValueError, match="number of chunks must be at least 1, not 0"):
        interleaved_1f1b(2, 2, chunks=0)
    with pytest.raises(ValueError, match="number of microbatches"):
        clock_cycles(0, 2)
