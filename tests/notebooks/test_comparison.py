"""The comparison of two executions ignores times, and nothing else that teaches."""

from tests.notebooks.books import texts_of


def text(plain: str) -> str:
    return texts_of([{"data": {"text/plain": plain}}])


def test_times_rates_paths_and_processes_may_differ():
    for one, other in (
        ("alpha 76.86 us", "alpha 1,250 us"),
        ("loopback   28.84 Gbit/s   measured", "loopback    9.1 Gbit/s   measured"),
        ("the ring takes 4.61 times as long", "the ring takes 5.2 times as long"),
        ("measured 2.000 ms   2.000 times the prediction", "measured 1.010 ms   as predicted, within 5 %"),
        ("/tmp/a/x.py:3 in f", "/home/b/x.py:3 in f"),
        ("rank 0 is process 12 on vm, at 127.0.0.1:4000", "rank 0 is process 9 on a.local, at 127.0.0.1:31"),
    ):
        assert text(one) == text(other)


def test_what_teaches_may_not_differ():
    for one, other in (
        ("measured   2.000     2.000 times the prediction", "measured   1.000     exactly as predicted"),
        ("rank 0 sends 6.000 MB", "rank 0 sends 12.00 MB"),
        ("4 ms: ring", "4 ms: tree"),
    ):
        assert text(one) != text(other)


def test_a_line_may_come_in_one_piece_or_in_several():
    pieces = [{"text": "[rank 0] a\n[ra"}, {"text": "nk 1] b"}, {"text": "\n"}]
    assert texts_of(pieces) == texts_of([{"text": "[rank 1] b\n[rank 0] a\n"}]) == "[rank 0] a\n[rank 1] b"
    value = {"data": {"text/plain": "3"}}
    assert texts_of([{"text": "a"}, value]) == texts_of([{"text": "a"}, {"text": "\n"}, value]) == "a\n3"
