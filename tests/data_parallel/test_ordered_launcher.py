from hypothesis import given
from hypothesis import strategies as st

from data_parallel.ordered_launcher import OrderedLauncher


def test_an_item_that_is_ready_early_waits_for_the_items_before_it():
    started: list[int] = []
    launcher = OrderedLauncher(5, started.append)
    starts = []
    for i in (2, 0, 3, 1, 4):
        launcher.ready(i)
        starts.append(list(started))
    assert starts == [[], [0], [0], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@given(st.integers(1, 9).flatmap(lambda count: st.permutations(range(count))))
def test_items_start_in_order_and_as_early_as_possible(order: list[int]):
    started: list[int] = []
    launcher = OrderedLauncher(len(order), started.append)
    for _ in range(2):
        for position, i in enumerate(order):
            assert not launcher.is_ready(i)
            launcher.ready(i)
            ready = set(order[: position + 1])
            longest = next(n for n in range(len(order), -1, -1) if ready >= set(range(n)))
            assert started == list(range(longest))
            assert launcher.is_ready(i)
            assert launcher.missing() == [j for j in range(len(order)) if j not in ready]
        started.clear()
        launcher.reset()


def test_a_reset_forgets_items_that_are_ready_but_not_started():
    started: list[int] = []
    launcher = OrderedLauncher(2, started.append)
    launcher.ready(1)
    launcher.reset()
    launcher.ready(0)
    assert started == [0]
    assert launcher.missing() == [1]


def test_without_items_nothing_is_missing():
    assert OrderedLauncher(0, lambda i: None).missing() == []
