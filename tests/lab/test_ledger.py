import pickle
import threading

from lab.trace.ledger import LEDGER, Entry, Ledger, Traffic


def test_traffic_adds_and_subtracts():
    assert Traffic(10, 2) + Traffic(5, 1) == Traffic(15, 3)
    assert Traffic(10, 2) - Traffic(5, 1) == Traffic(5, 1)
    assert sum([Traffic(1, 1)] * 3, Traffic()) == Traffic(3, 3)


def test_counted_traffic_and_traffic_by_formula_stand_in_rows_of_their_own():
    ledger = Ledger()
    ledger.count("all_reduce", "ring", 100)
    ledger.count("all_reduce", "ring", 50, messages=3)
    ledger.add_formula("all_reduce", "ring", Traffic(7, 1))
    ledger.count("all_reduce", "tree", 1)
    assert ledger.rows() == {
        Entry("all_reduce", "ring"): Traffic(150, 4),
        Entry("all_reduce", "ring", by_formula=True): Traffic(7, 1),
        Entry("all_reduce", "tree"): Traffic(1, 1),
    }
    assert ledger.total() == Traffic(158, 6)


def test_the_difference_of_two_totals_is_the_traffic_between_them():
    ledger = Ledger()
    ledger.count("broadcast", "tree", 10)
    before = ledger.total()
    ledger.count("broadcast", "tree", 32, messages=2)
    assert ledger.total() - before == Traffic(32, 2)


def test_rows_are_a_copy_and_clear_forgets_everything():
    ledger = Ledger()
    ledger.count("gather", "flat", 10)
    rows = ledger.rows()
    ledger.clear()
    assert rows == {Entry("gather", "flat"): Traffic(10, 1)}
    assert ledger.rows() == {} and ledger.total() == Traffic()


def test_nothing_is_lost_when_two_threads_count_at_once():
    ledger = Ledger()

    def count() -> None:
        for _ in range(5000):
            ledger.count("scatter", "flat", 2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.total() == Traffic(40000, 20000)


def test_the_ledger_that_travels_to_another_rank_is_that_ranks_own():
    assert pickle.loads(pickle.dumps(LEDGER)) is LEDGER
