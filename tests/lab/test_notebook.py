"""The extension of IPython runs cells on ranks that stay, and survive errors, deadlocks and Ctrl-C.

tests/notebooks/test_kernels.py uses it in a kernel.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from lab.launch.errors import WorkbookError
from lab.notebook.prediction import Prediction, predict
from lab.trace.gantt import Event
from tests.processes import is_alive

PROMPTLY = 20  # seconds; nothing else would end such a cell within minutes


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    one = InteractiveShell()
    one.run_line_magic("load_ext", "lab.notebook")
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


def test_a_cell_runs_on_all_ranks_or_some_variables_stay_and_equal_values_are_shown_once(shell):
    run(shell, "%%ranks\nx = torch.ones(2) * rank")
    assert run(shell, "%%ranks\ndist.all_reduce(x)\nx") == "ranks 0, 1, 2: tensor([3., 3.])"
    assert run(shell, "%%ranks\n_ + 1") == "ranks 0, 1, 2: tensor([4., 4.])"
    assert run(shell, "%%ranks\nrank % 2") == "ranks 0, 2: 0\nrank 1: 1"
    assert run(shell, "%%rank 1, 2\nrank") == "rank 1: 1\nrank 2: 2"
    assert run(shell, "%%ranks\ny = 1") == run(shell, "%%ranks\nx;") == ""
    lines = run(shell, "%%rank 0,2\nprint('hello')").splitlines()
    assert sorted(lines) == ["[rank 0] hello", "[rank 2] hello"]


def test_values_go_to_the_ranks_and_come_back(shell):
    run(shell, "push(lr=0.5); push(lr=1.5, ranks=[1])")
    run(shell, "rates = pull('lr')")
    assert shell.user_ns["rates"] == {0: 0.5, 1: 1.5, 2: 0.5}
    with pytest.raises(WorkbookError, match="rank 0: NameError: name 'missing' is not defined"):
        run(shell, "pull('missing')")


def test_errors_are_sentences_without_this_processs_traceback(shell):
    with pytest.raises(WorkbookError) as error:
        run(shell, "%%ranks\n1 / (rank - 1)")
    lines = error.value._render_traceback_()
    assert lines[0] == "rank 1 failed:" and "ZeroDivisionError" in lines[-1]
    assert any("1 / (rank - 1)" in line for line in lines) and not any(
        "ranks/cells" in line for line in lines
    )
    for cell, sentence in (
        (
            "%ranks four",
            "%ranks four: write a number of ranks (and cuda, to use GPUs), or status, restart or stop.",
        ),
        ("%ranks 2 cuda", "run_ranks(device='cuda'): this machine has 0 GPUs."),
        ("%%ranks 0\n1", "%%ranks 0: for some of the ranks write %%rank, as in %%rank 0,2."),
        ("%%rank x\n1", "%%rank x: write ranks such as 0 or 0,2."),
        ("%%rank 7\n1", "There is no rank 7: there are 3, from 0 on. %ranks N starts N."),
    ):
        with pytest.raises(WorkbookError, match=f"^{re.escape(sentence)}$"):
            run(shell, cell)


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        ("t = torch.ones(2)\ndist.recv(t, (rank + 1) % 3)", ":2 in <module>: dist.recv(t, (rank + 1) % 3)"),
        ("import time\nwhile True:\n    time.sleep(0.1)", "time.sleep(0.1)"),
        (
            "from comm.collectives import all_reduce\nif rank: all_reduce(torch.ones(3))\n"
            "else: dist.barrier()",
            "else: dist.barrier()",
        ),
    ],
    ids=["a deadlock in gloo", "a loop", "ranks in different operations"],
)
def test_an_interrupt_returns_says_where_each_rank_was_and_keeps_the_variables(shell, cell, place):
    run(shell, "%%ranks\nimport os\nkept = rank * 10, os.getpid()")
    run(shell, "before = pull('kept')")
    # A shell starts background jobs with Ctrl-C ignored, and their processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(WorkbookError) as error:
        run(shell, f"%%ranks\n{cell}")
    assert time.monotonic() - start < 0.3 + PROMPTLY
    text = str(error.value)
    assert text.startswith("The cell was interrupted.") and place in text
    assert all(f"rank {rank} was at " in text for rank in range(3))
    assert text.endswith("The ranks keep their variables.")
    run(shell, "after = pull('kept')")
    assert shell.user_ns["after"] == shell.user_ns["before"]
    for all_reduce in ("dist.all_reduce(s)", "from comm.collectives import all_reduce; all_reduce(s)"):
        said = run(shell, f"%%ranks\ns = torch.ones(5)\n{all_reduce}\ns.sum().item()")
        assert said == "ranks 0, 1, 2: 15.0"


def test_ranks_that_wait_for_one_that_failed_are_interrupted(shell, monkeypatch):
    monkeypatch.setattr("lab.ranks.standing.WAIT_AFTER_ERROR", 0.2)
    with pytest.raises(WorkbookError) as error:
        run(shell, "%%ranks\nif rank == 1:\n    raise ValueError('the cause')\ndist.barrier()")
    text = str(error.value)
    assert "rank 1 failed (ValueError: the cause), and the other ranks still waited." in text
    assert "raise ValueError('the cause')" in text
    assert re.search(r"rank 2 was at <cell \d*>:3 in <module>: dist\.barrier\(\)", text)


def test_a_rank_that_ends_is_named_and_all_are_started_again(shell):
    run(shell, "%%ranks\nlost = 1")
    sentence = r"rank 2 was killed by SIGKILL\. All ranks have been started again"
    with pytest.raises(WorkbookError, match=sentence):
        run(shell, "%%ranks\nimport os\nif rank == 2: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert run(shell, "%%ranks\n'lost' in globals()") == "ranks 0, 1, 2: False"


def test_ranks_are_restarted_stopped_and_started_when_a_cell_needs_them(shell):
    run(shell, "%%ranks\nold = 1")
    assert run(shell, "%ranks restart") == "3 ranks are running."
    with pytest.raises(WorkbookError, match="NameError"):
        run(shell, "pull('old')")
    assert run(shell, "%ranks stop") == "The ranks have stopped."
    assert run(shell, "%ranks stop") == "No ranks are running. %ranks 4 starts four."
    assert run(shell, "%%rank 3\nworld_size").endswith("rank 3: 4")
    run(shell, "%ranks 3")


def test_ranks_end_when_the_extension_is_unloaded_or_loaded_again(shell):
    run(shell, "mine = push")
    for command in ("%reload_ext lab.notebook", "%unload_ext lab.notebook"):
        run(shell, "%ranks 2")
        run(shell, "%%ranks\nimport os\nprocess = os.getpid()")
        run(shell, "processes = pull('process')")
        run(shell, command)
        assert not any(map(is_alive, shell.user_ns["processes"].values()))
    assert "push" not in shell.user_ns and "mine" in shell.user_ns
    assert not {"ranks", "rank"} & {name for kind in shell.magics_manager.magics.values() for name in kind}
    run(shell, "%load_ext lab.notebook")
    run(shell, "%ranks 3")


def test_a_cells_timeline_is_drawn(shell, monkeypatch):
    drawn: list[tuple[list[Event], str]] = []
    monkeypatch.setattr("lab.notebook.picture.show_events", lambda events, alt: drawn.append((events, alt)))
    run(shell, "%%ranks --timeline\nfrom comm.collectives import all_reduce\nall_reduce(torch.ones(2));")
    (events, alt) = drawn[0]
    assert {(event.rank, event.name) for event in events} >= {(rank, "all_reduce") for rank in range(3)}
    assert alt == "Timeline of this cell on ranks 0, 1, 2: communication."
    assert run(shell, "%%ranks --timeline\nx = 1").startswith("Nothing was recorded")


def predicted(*texts: str, monkeypatch, unit: str = "") -> Prediction:
    answers = iter(texts)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    return predict("How large?", example=1.0, unit=unit)


def test_a_prediction_is_asked_for_until_a_number_is_typed_and_stands_beside_the_result(capsys, monkeypatch):
    guess = predicted("two", "1,024.5", monkeypatch=monkeypatch, unit="MB")
    assert capsys.readouterr().out.startswith(
        "'two' is not a number. Type one, such as 2, 0.5, 1/2 or 50%, or"
    )
    assert repr(guess.compare(2049)) == "predicted  1024 MB\nmeasured   2049 MB        wrong"
    assert "\nformula    2049 MB " in repr(guess.compare(2049, by="formula"))
    assert "<td style='text-align:left'>2049 MB</td>" in guess.compare(2049)._repr_html_()


@pytest.mark.parametrize(
    "text, right, wrong",
    [
        *(("50%", 0.5, 0.4), ("1/2", 0.52, 0.56), ("0.5", 0.5, 1), ("1-2", 1.99, 2.01), ("-3", -3, 3)),
        *(("40-50 %", 0.45, 45), ("3 to 4 times", 3, 5), ("20", 20, 21)),
    ],
)
def test_a_prediction_may_be_a_share_or_a_range_and_is_right_or_wrong(text, right, wrong, monkeypatch):
    guess = predicted(text, monkeypatch=monkeypatch, unit="times")
    assert (guess.compare(right).verdict, guess.compare(wrong).verdict) == ("right", "wrong")


def test_enter_skips_a_prediction(monkeypatch):
    shown = repr(predicted("", monkeypatch=monkeypatch).compare(3))
    assert shown == "predicted\nmeasured   3              not predicted"


def test_without_a_keyboard_the_example_is_taken_and_that_is_said(capsys, monkeypatch):
    def closed(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    assert predict("How many?", example=3, unit="times").value == (3, 3)
    assert capsys.readouterr().out == "How many? 3 times (an example, because there is no keyboard)\n"
