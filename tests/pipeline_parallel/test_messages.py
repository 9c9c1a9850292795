"""Each message is put into the table once and in its order, and no rank waits without end."""

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_parallel.actions import Action, Table, parse_row, placement
from pipeline_parallel.messages import (
    Message,
    Receive,
    Send,
    Step,
    WaitForSend,
    has_split_backward,
    neighbours,
    received_by,
    sent_by,
    with_messages,
)
from pipeline_parallel.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from tests.pipeline_parallel.test_simulate import tables

some_ahead = st.integers(0, 3)


def text(program: list[Step]) -> str:
    """Write actions as 0F1, messages as >0F1 (send), <0F1 (receive) and =0F1 (sent)."""
    signs = {Send: ">", Receive: "<", WaitForSend: "="}
    return " ".join(
        str(step)
        if isinstance(step, Action)
        else f"{signs[type(step)]}{step.message.stage}{step.message.kind}{step.message.microbatch}"
        for step in program
    )


def actions(program: list[Step]) -> list[Action]:
    return [step for step in program if isinstance(step, Action)]


def crossing(table: Table, of) -> dict[Message, tuple[int, int]]:
    """Return the rank and place in its row where messages are made (of=sent_by) or used (of=received_by)."""
    rank_of = placement(table)
    last = max(rank_of)
    return {
        message: (rank, at)
        for rank, row in enumerate(table)
        for at, action in enumerate(row)
        if (message := of(action, last)) is not None and rank_of[message.stage] != rank_of[message.receiver]
    }


def run_by_chance(programs: list[list[Step]], table: Table, seed: int) -> int:
    """Let the ranks go on in any order, and return how many messages arrived. AssertionError if all ranks
    wait.

    A message arrives once it is sent and its receive is posted, and the k-th receive from a rank meets its
    k-th send.
    """
    rng = random.Random(seed)
    last = max(placement(table))
    sent, posted = defaultdict(list), defaultdict(list)  # by (from, to)
    done = [0] * len(programs)
    here: list[set[Message]] = [set() for _ in programs]  # what the rank has, and has not used

    def has_arrived(source: int, to: int, message: Message) -> bool:
        pairs = list(zip(sent[source, to], posted[source, to], strict=False))
        assert all(ours == theirs for ours, theirs in pairs), f"{pairs} meet"
        return any(ours == message for ours, _ in pairs)

    def can_go_on(rank: int) -> bool:
        step = programs[rank][done[rank]]
        if isinstance(step, WaitForSend):
            return has_arrived(rank, step.peer, step.message)
        if isinstance(step, Action) and (needed := received_by(step, last)) is not None:
            source = placement(table)[needed.stage]
            return needed in here[rank] if source == rank else has_arrived(source, rank, needed)
        return True

    while waiting := [rank for rank, program in enumerate(programs) if done[rank] < len(program)]:
        able = [rank for rank in waiting if can_go_on(rank)]
        assert able, "all wait: " + ", ".join(f"rank {r} at {programs[r][done[r]]}" for r in waiting)
        rank = rng.choice(able)
        step = programs[rank][done[rank]]
        done[rank] += 1
        match step:
            case Send(message, peer):
                assert message in here[rank], f"{message} is sent before it is made"
                here[rank].remove(message)
                sent[rank, peer].append(message)
            case Receive(message, peer):
                posted[peer, rank].append(message)
            case Action():
                if (needed := received_by(step, last)) in here[rank]:
                    here[rank].remove(needed)
                if (made := sent_by(step, last)) is not None:
                    here[rank].add(made)
    assert sent == posted and not any(here)
    return sum(map(len, sent.values()))


def test_two_ranks_of_gpipe():
    first, second = with_messages(gpipe(2, 2))
    assert text(first) == "<1I0 0F0 >0F0 <1I1 0F1 >0F1 =0F0 =0F1 0B0 0B1"
    assert text(second) == "<0F0 <0F1 1F0 1F1 1B0 >1I0 1B1 >1I1 =1I0 =1I1"
    first, second = with_messages(gpipe(2, 2), ahead=1)
    assert text(first) == "0F0 >0F0 <1I0 0F1 >0F1 <1I1 =0F0 =0F1 0B0 0B1"


def test_without_looking_ahead_a_receive_is_posted_just_before_it_is_needed():
    first, second = with_messages(one_f_one_b(2, 2), ahead=0)
    assert text(first) == "0F0 >0F0 0F1 >0F1 <1I0 =0F0 0B0 <1I1 =0F1 0B1"
    assert text(second) == "<0F0 1F0 1B0 >1I0 <0F1 1F1 1B1 >1I1 =1I0 =1I1"


def test_stages_of_one_rank_send_each_other_nothing():
    table = [parse_row("0F0 1F0 2F0 2B0 1B0 0B0")]
    assert with_messages(table) == table
    assert text(with_messages([parse_row("0F0 1F0 1B0 0B0"), parse_row("2F0 2B0")], ahead=1)[0]) == (
        "0F0 <2I0 1F0 >1F0 =1F0 1B0 0B0"
    )


def test_receives_stand_in_the_senders_order_even_where_another_one_is_needed_first():
    table = [parse_row("F0 F1 B0 B1", 0), parse_row("F1 F0 B0 B1", 1)]
    assert text(with_messages(table, ahead=0)[1]).startswith("<0F0 <0F1 1F1 1F0")


def test_a_negative_number_of_actions_ahead_is_refused():
    with pytest.raises(ValueError, match="posted 2 actions late"):
        with_messages(gpipe(2, 2), ahead=-2)


def test_backwards_are_split_where_any_action_is():
    assert has_split_backward(zb_h1(2, 2)) and not has_split_backward(one_f_one_b(2, 2))


@settings(max_examples=150)
@given(tables(), some_ahead)
def test_actions_stay_as_they_were_and_each_message_is_sent_received_and_awaited_once(table: Table, ahead):
    programs = with_messages(table, ahead)
    assert [actions(program) for program in programs] == table
    made, used, rank_of = crossing(table, sent_by), crossing(table, received_by), placement(table)
    assert made.keys() == used.keys()
    counted = Counter(
        (type(step), rank, step.peer, step.message)
        for rank, program in enumerate(programs)
        for step in program
        if not isinstance(step, Action)
    )
    expected = []
    for message in made:
        source, to = rank_of[message.stage], rank_of[message.receiver]
        expected += [
            (Send, source, to, message),
            (WaitForSend, source, to, message),
            (Receive, to, source, message),
        ]
    assert counted == Counter(expected)


@settings(max_examples=150)
@given(tables(), some_ahead)
def test_a_message_is_sent_at_once_by_the_action_that_makes_it(table: Table, ahead):
    last = max(placement(table))
    for program in with_messages(table, ahead):
        for before, step in pairwise(program):
            if isinstance(step, Send):
                assert isinstance(before, Action) and sent_by(before, last) == step.message


@settings(max_examples=150)
@given(tables(), some_ahead)
def test_receives_of_a_neighbour_are_posted_in_its_order_and_exactly_as_early_as_asked(table: Table, ahead):
    """Before an action stand all receives, in the sender's order, up to the last that it or the next ones
    need.
    """
    programs, last = with_messages(table, ahead), max(placement(table))
    for rank, program in enumerate(programs):
        for source in range(len(table)):
            sends = [s.message for s in programs[source] if isinstance(s, Send) and s.peer == rank]
            posted: list[Message] = []
            at = 0
            for step in program:
                if isinstance(step, Receive) and step.peer == source:
                    posted.append(step.message)
                if isinstance(step, Action):
                    soon = [received_by(action, last) for action in table[rank][: at + ahead + 1]]
                    wanted = [sends.index(message) for message in soon if message in sends]
                    assert posted == sends[: max(wanted, default=-1) + 1]
                    at += 1
            assert posted == sends


@settings(max_examples=150)
@given(tables(), some_ahead)
def test_sent_stands_before_the_first_action_that_needs_a_proof_of_it_or_at_the_end(table: Table, ahead):
    """The proof is a message that the receiver made with it, or later."""
    rank_of, last = placement(table), max(placement(table))
    made, used = crossing(table, sent_by), crossing(table, received_by)
    for rank, program in enumerate(with_messages(table, ahead)):
        for at, step in enumerate(program):
            if not isinstance(step, WaitForSend):
                continue
            needs = [received_by(action, last) for action in table[rank]]
            proofs = [
                place
                for place, answer in enumerate(needs)
                if answer in made
                and rank_of[answer.stage] == step.peer
                and made[answer][1] >= used[step.message][1]
            ]
            later = actions(program[at:])
            assert Send(step.message, step.peer) in program[:at]
            assert len(later) == len(table[rank]) - min(proofs, default=len(table[rank]))


@settings(max_examples=150)
@given(tables(), some_ahead, st.integers(0, 10**6))
def test_ranks_that_go_on_in_any_order_come_to_the_end(table: Table, ahead, seed):
    arrived = run_by_chance(with_messages(table, ahead), table, seed)
    assert arrived == len(crossing(table, sent_by))


def test_the_machine_of_that_test_notices_ranks_that_wait_for_each_other():
    table = one_f_one_b(2, 1)
    first, second = with_messages(table)
    stuck = [step for step in second if not isinstance(step, Receive)]
    with pytest.raises(AssertionError, match=r"all wait: rank 0 at .*, rank 1 at"):
        run_by_chance([first, stuck], table, 0)
    swapped = [parse_row("F0 F1 B0 B1", 0), parse_row("F0 F1 B0 B1", 1)]
    first, second = with_messages(swapped)
    second[0], second[1] = second[1], second[0]
    with pytest.raises(AssertionError, match="meet"):
        run_by_chance([first, second], swapped, 0)


def test_neighbours_are_the_ranks_of_consecutive_stages_in_both_directions():
    row = {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert neighbours(with_messages(gpipe(3, 2))) == row
    assert neighbours(with_messages(interleaved_1f1b(3, 6, 2))) == row | {(2, 0), (0, 2)}
