from hypothesis import given
from hypothesis import strategies as st

from data_parallel.in_order import InOrder


def test_what_is_ready_early_waits_for_those_before_it():
    started: list[int] = []
    in_order = InOrder(5, started.append)
    starts = []
    for i in (2, 0, 3, 1, 4):
        in_order.ready(i)
        starts.append(list(started))
    assert starts == [[], [0], [0], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@given(st.integers(1, 9).flatmap(lambda count: st.permutations(range(count))))
def test_whatever_becomes_ready_first_all_start_in_order_and_none_later_than_it_can(order: list[int]):
    started: list[int] = []
    in_order = InOrder(len(order), started.append)
    for _ in range(2):
        for position, i in enumerate(order):
            assert not in_order.is_ready(i)
            in_order.ready(i)
            ready = set(order[: position + 1])
            longest = next(n for n in range(len(order), -1, -1) if ready >= set(range(n)))
            assert started == list(range(longest))
            assert in_order.is_ready(i)
            assert in_order.missing() == [j for j in range(len(order)) if j not in ready]
        started.clear()
        in_order.reset()


def test_a_reset_forgets_what_was_ready_and_has_not_started():
    started: list[int] = []
    in_order = InOrder(2, started.append)
    in_order.ready(1)
    in_order.reset()
    in_order.ready(0)
    assert started == [0]
    assert in_order.missing() == [1]


def test_nothing_is_missing_of_nothing():
    assert InOrder(0, lambda i: None).missing() == []
