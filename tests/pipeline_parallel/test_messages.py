"""Each message is received once, in the order in which it is sent, and no rank waits without end."""

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_parallel.actions import Table, placement
from pipeline_parallel.messages import Message, received_by, receives_before, sent_by
from pipeline_parallel.schedules import SCHEDULES, gpipe, one_f_one_b, table_of
from tests.pipeline_parallel.rows import parse_row

tables = st.builds(
    table_of, st.sampled_from([*SCHEDULES]), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)
)
some_ahead = st.integers(0, 3)


def text(table: Table, rank: int, ahead: int) -> str:
    """Write the actions of a rank as 0F1, and the receives before them as <0F1."""
    words = []
    for action, receives in zip(table[rank], receives_before(table, rank, ahead), strict=True):
        words += [f"<{message.stage}{message.kind}{message.microbatch}" for message in receives] + [
            str(action)
        ]
    return " ".join(words)


def expect(table: Table, rank: int, ahead: int, expected: str) -> None:
    got = text(table, rank, ahead)
    assert got == expected, f"rank {rank}, {ahead} actions ahead, where <1I0 is a receive of 1I0"


def sends(table: Table, source: int, to: int) -> list[Message]:
    """Return the messages of one rank to another in the order of sending."""
    rank_of = placement(table)
    made = [sent_by(action, max(rank_of)) for action in table[source]]
    return [message for message in made if message is not None and rank_of[message.receiver] == to != source]


def test_two_ranks_of_gpipe():
    expect(gpipe(2, 2), 0, 2, "<1I0 0F0 <1I1 0F1 0B0 0B1")
    expect(gpipe(2, 2), 1, 2, "<0F0 <0F1 1F0 1F1 1B0 1B1")
    expect(gpipe(2, 2), 0, 1, "0F0 <1I0 0F1 <1I1 0B0 0B1")


def test_without_looking_ahead_a_receive_is_posted_just_before_it_is_needed():
    expect(one_f_one_b(2, 2), 0, 0, "0F0 0F1 <1I0 0B0 <1I1 0B1")
    expect(one_f_one_b(2, 2), 1, 0, "<0F0 1F0 1B0 <0F1 1F1 1B1")


def test_stages_of_one_rank_send_each_other_nothing():
    expect([parse_row("0F0 1F0 2F0 2B0 1B0 0B0")], 0, 2, "0F0 1F0 2F0 2B0 1B0 0B0")
    expect([parse_row("0F0 1F0 1B0 0B0"), parse_row("2F0 2B0")], 0, 1, "0F0 <2I0 1F0 1B0 0B0")


def test_receives_stand_in_the_senders_order_even_where_another_one_is_needed_first():
    table = [parse_row("F0 F1 B0 B1", 0), parse_row("F1 F0 B0 B1", 1)]
    assert text(table, 1, 0).startswith("<0F0 <0F1 1F1 1F0")


@settings(max_examples=100)
@given(tables, some_ahead)
def test_receives_from_a_rank_are_posted_in_its_order_and_exactly_as_early_as_asked(table: Table, ahead):
    """Before an action stand all receives, in the sender's order, up to the last that it or the next ones
    need.
    """
    last = max(placement(table))
    for rank, row in enumerate(table):
        receives = receives_before(table, rank, ahead)
        for source in range(len(table)):
            coming, posted = sends(table, source, rank), []
            for at in range(len(row)):
                posted += [message for message in receives[at] if message in coming]
                soon = [received_by(action, last) for action in row[: at + ahead + 1]]
                wanted = [coming.index(message) for message in soon if message in coming]
                assert posted == coming[: max(wanted, default=-1) + 1]
            assert posted == coming


@settings(max_examples=100)
@given(tables, some_ahead, st.integers(0, 10**6))
def test_ranks_that_go_on_in_any_order_come_to_the_end(table: Table, ahead, seed):
    """A message arrives once it is sent and its receive is posted; the k-th receive meets the k-th send."""
    rng, rank_of = random.Random(seed), placement(table)
    last = max(rank_of)
    receives = [receives_before(table, rank, ahead) for rank in range(len(table))]
    sent, posted = defaultdict(list), defaultdict(list)  # by (from, to)
    done, here = [0] * len(table), set()  # `here`: results that another stage of the same rank needs

    def post(rank: int) -> None:
        if done[rank] < len(table[rank]):
            for message in receives[rank][done[rank]]:
                posted[rank_of[message.stage], rank].append(message)

    def can_go_on(rank: int) -> bool:
        needed = received_by(table[rank][done[rank]], last)
        if needed is None or (source := rank_of[needed.stage]) == rank:
            return needed is None or needed in here
        pairs = list(zip(sent[source, rank], posted[source, rank], strict=False))
        assert all(ours == theirs for ours, theirs in pairs), f"{pairs} meet"
        return any(ours == needed for ours, _ in pairs)

    for rank in range(len(table)):
        post(rank)
    while waiting := [rank for rank, row in enumerate(table) if done[rank] < len(row)]:
        able = [rank for rank in waiting if can_go_on(rank)]
        assert able, "all wait: " + ", ".join(f"rank {r} at {table[r][done[r]]}" for r in waiting)
        rank = rng.choice(able)
        made = sent_by(table[rank][done[rank]], last)
        if made is not None and rank_of[made.receiver] != rank:
            sent[rank, rank_of[made.receiver]].append(made)
        elif made is not None:
            here.add(made)
        done[rank] += 1
        post(rank)
    assert sent == posted
