import threading

from lab.trace.ledger import Entry, Ledger, Traffic


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
