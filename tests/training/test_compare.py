"""`make compare` runs modes in turn, and shows them in one table, one picture and one sentence."""

import pytest

from lab.launch.errors import WorkbookError
from lab.trace.gantt import Event
from lab.trace.timeline import read_chrome_trace, write_chrome_trace
from training import compare


def figures(mode: str, step: float, communication: float | None = 0.4, **more: object) -> compare.Figures:
    shares = {"compute_seconds": 0.5, "communication_seconds": communication, "hidden_share": 0.25}
    counted = {"bytes_sent": 10, "messages_sent": 2, "peak_memory_bytes": 7, "last_loss": None}
    return {"run_mode": mode, "world_size": 2, "steps": 4, "step_seconds": step} | shares | counted | more


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        (
            (figures("a", 1.0), figures("b", 0.25, 0.2)),
            "A step of b takes 0.25 of one of a: 150.0 ms instead of 300.0 ms of communication that no "
            "computing hides, and 500.0 ms instead of 500.0 ms of computing.",
        ),
        ((figures("a", 1.0, None), figures("b", 2.0)), "A step of a takes 0.50 of one of b."),
        (
            (figures("a", 1.0, None, bubble=0.2), figures("b", 2.0, None, bubble=0.6)),
            "A step of a takes 0.50 of one of b: ranks are idle for 20% of it instead of 60%.",
        ),
    ],
)
def test_the_sentence_says_where_the_time_of_the_slowest_went(runs, sentence):
    assert compare.conclusion({f["run_mode"]: (f, []) for f in runs}) == sentence


def test_the_table_has_no_row_that_no_mode_can_fill():
    table = compare.table_of({f["run_mode"]: (f, []) for f in (figures("a", 1.0), figures("b", 2.0, None))})
    names = list(table.columns[0].cells)
    assert "not hidden" in names and "bubble" not in names and "last loss" not in names


def test_a_trace_is_read_as_it_was_written(tmp_path):
    events = [
        Event("F0", "forward", 0, 2_000, rank=0),
        Event("x", "communication", 1_000, 500, "wire", {"n": 1}, 1),
    ]
    assert sorted(read_chrome_trace(write_chrome_trace(tmp_path / "t.json", events))) == sorted(events)


@pytest.mark.parametrize(
    ("modes", "words", "sentence"),
    [
        ("naive data_parallel_naive", "", "MODES: name at least two different RUN_MODEs"),
        ("comm zero1", "", "MODES: comm has no timeline to compare"),
        ("zero1 zreo2", "", "MODES: There is no RUN_MODE 'zreo2': did you mean zero2"),
        ("zero1 zero2", "--json", "make compare itself adds --json and --trace"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(modes, words, sentence):
    with pytest.raises(WorkbookError, match=sentence):
        compare.main(modes.split(), words, in_containers=False)
