"""The extension of IPython runs cells on ranks. tests/notebooks/test_kernels.py uses it in a kernel."""

import re
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from lab.notebook.magics import CellError
from lab.trace.gantt import Event


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    one = InteractiveShell()
    one.run_line_magic("load_ext", "lab.notebook.magics")
    run(one, "%ranks 3")
    yield one
    run(one, "%ranks stop")


def run(shell: InteractiveShell, cell: str) -> str:
    """Run a cell; return what it shows, or raise the error with which it ends."""
    with capture_output() as captured:
        outcome = shell.run_cell(cell)
    if error := outcome.error_before_exec or outcome.error_in_exec:
        raise error
    return captured.stdout.rstrip()


def test_a_cell_runs_on_all_ranks_and_equal_values_are_shown_once(shell):
    assert run(shell, "%%ranks\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nx") == (
        "ranks 0, 1, 2: tensor([3., 3.])"
    )
    assert run(shell, "%%ranks\nrank % 2") == "ranks 0, 2: 0\nrank 1: 1"
    assert run(shell, "%%rank 1-2\nrank") == "rank 1: 1\nrank 2: 2"
    assert run(shell, "%%ranks\ny = 1") == ""


def test_lines_are_tagged_by_rank(shell):
    lines = run(shell, "%%rank 0,2\nprint('hello')").splitlines()
    assert sorted(lines) == ["[rank 0] hello", "[rank 2] hello"]


def test_values_go_to_the_ranks_and_come_back(shell):
    run(shell, "push(lr=0.5); push(lr=1.5, ranks=[1])")
    run(shell, "rates = pull('lr')")
    assert shell.user_ns["rates"] == {0: 0.5, 1: 1.5, 2: 0.5}
    with pytest.raises(CellError, match="rank 0: NameError: name 'missing' is not defined"):
        run(shell, "pull('missing')")


def test_errors_are_sentences_without_this_processs_traceback(shell):
    with pytest.raises(CellError) as error:
        run(shell, "%%ranks\n1 / (rank - 1)")
    lines = error.value._render_traceback_()
    assert lines[0] == "rank 1 failed:" and "ZeroDivisionError" in lines[-1]
    for cell, sentence in (
        (
            "%ranks four",
            "%ranks four: write a number of ranks (and cuda, to use GPUs), or status, times, restart, stop, "
            "everywhere or here.",
        ),
        ("%ranks 2 cuda", "run_ranks(device='cuda'): this machine has no GPU; leave device out."),
        ("%%ranks 0\n1", "%%ranks 0: for some of the ranks write %%rank, as in %%rank 0,2."),
        ("%%rank x\n1", "%%rank x: write ranks such as 0 or 0,2 or 1-3."),
        ("%%rank 7\n1", "There is no rank 7: there are 3, from 0 on. %ranks N starts N."),
    ):
        with pytest.raises(CellError, match=f"^{re.escape(sentence)}$"):
            run(shell, cell)


def test_ranks_are_restarted_stopped_and_started_when_a_cell_needs_them(shell):
    run(shell, "%%ranks\nold = 1")
    assert run(shell, "%ranks restart") == "3 ranks are running."
    with pytest.raises(CellError, match="NameError"):
        run(shell, "pull('old')")
    assert run(shell, "%ranks stop") == "The ranks have stopped."
    assert run(shell, "%ranks stop") == "No ranks are running. %ranks 4 starts four."
    assert run(shell, "%%rank 3\nworld_size").endswith("rank 3: 4")
    run(shell, "%ranks 3")


def test_a_cells_timeline_is_drawn(shell, monkeypatch):
    drawn: list[tuple[list[Event], str]] = []
    monkeypatch.setattr("lab.notebook.picture.show_events", lambda events, alt: drawn.append((events, alt)))
    run(shell, "%%ranks --timeline\nfrom comm.collectives import all_reduce\nall_reduce(torch.ones(2));")
    (events, alt) = drawn[0]
    assert {(event.rank, event.name) for event in events} >= {(rank, "all_reduce") for rank in range(3)}
    assert alt == "Timeline of this cell on ranks 0, 1, 2: communication."
    assert run(shell, "%%ranks --timeline\nx = 1").startswith("Nothing was recorded")
