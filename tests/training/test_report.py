"""The report names the pattern and the transport that have carried the steps' messages."""

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.wire import shared_memory
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.trace.gantt import Event
from lab.trace.ledger import Entry, Traffic
from lab.trace.timeline import read_chrome_trace, write_chrome_trace
from lab.what_changed import SHORT
from tests.on_ranks import on_ranks
from tests.run_modes import NEXT, SCRIPTS, offers
from tests.training.attempts import train
from training import compare, conclusion
from training.report import median, pattern_and_transport, print_report

OURS = "shared_memory" if shared_memory.is_possible() else "sockets"

FIGURES = {"run_mode": "zero1", "world_size": 2, "steps": 3, "step_seconds": 0.1, "tokens_per_second": 9.0}

# Mode, options, and the pattern and the transport that the report names.
RUNS: list[tuple[str, dict[str, Any], str, str]] = [
    ("naive", {"pattern": "ring"}, "ring", OURS),
    ("naive", {"pattern": "torch"}, "torch", "gloo"),
    ("zero3", {"pattern": "pipelined_ring", "transport": "sockets"}, "pipelined_ring", "sockets"),
    ("zero3", {"transport": "gloo"}, "ring", "gloo"),
    ("sequence_parallel", {"pattern": "flat"}, "ring, flat", OURS),  # no operation but all-reduce has flat
    ("pipeline_1f1b", {"pattern": "tree", "transport": "sockets"}, "direct", "sockets"),
]


def test_json_is_one_line_on_stdout_and_a_report_has_all_rows_only_if_it_is_verbose(capfd):
    figures = FIGURES | {"bytes_sent": 70, "messages_sent": 2, "bytes_formula": 70, "messages_formula": 3}
    rank_0, rank_1 = (Cluster(i, 2, i, torch.device("cpu"), dist.HashStore()) for i in range(2))
    print_report(rank_1, figures)
    print_report(rank_0, figures, as_json=True, rows={"a lesson": "adds this"}, meaning="And this.")
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and json.loads(out) == figures
    text = " ".join(err.replace("│", "").split())  # rows that are longer than the screen go over two lines
    assert "70 and 2 in all, where the formula says 70 and 3" in text and "messages_formula" not in text
    assert "a lesson adds this" in text
    assert err.endswith("\nAnd this.\nmake run RUN_MODE=zero2 also divides the gradients.\n")
    print_report(rank_0, figures, verbose=True)
    assert "messages_formula" in capfd.readouterr().out


@on_ranks(2)
def test_a_report_names_the_pattern_and_the_transport_that_were_asked_for(cluster: Cluster):
    for mode, options, pattern, transport in RUNS:
        report = train(cluster, mode, steps=1, **options)
        assert (report["pattern"], report["transport"]) == (pattern, transport), (mode, options)
        assert report["bytes_sent"] == report["bytes_formula"], (mode, options)


def test_what_to_run_next_is_offered_there():
    assert set(NEXT) == set(SCRIPTS) - {"comm", "point_to_point"}
    for mode, text in NEXT.items():
        run = re.match(r"make run RUN_MODE=(\w+) ", text)
        compared = re.match(r"make compare MODES='(.+?)' ", text)
        assert run or compared, mode
        names = [run[1]] if run else [SHORT.get(name, name) for name in compared[1].split()]
        assert run or mode in names
        for name in names:
            assert name in SCRIPTS, mode
            for option in re.findall(r"--([a-z-]+)", text):
                assert offers(name, option.replace("-", "_")), (mode, name, option)


def test_a_sentence_fits_the_number_of_ranks():
    figures = FIGURES | {"world_size": 1, "step_seconds": 1.0, "compute_seconds": 0.8}
    figures |= {"communication_seconds": 0.1, "hidden_share": 0.0, "blocking_share": 1.0}
    [said] = conclusion.sentences(figures, None)
    assert said == "One rank sends nothing: make run RUN_MODE=zero1 WORLD_SIZE=2 divides the work."
    assert "communication" not in dict(conclusion.rows(figures, {}))
    said = conclusion.sentences(figures | {"world_size": 4}, "A lesson says this.")
    assert said == ["A lesson says this.", f"make run WORLD_SIZE=4 {NEXT['zero1'].removeprefix('make run ')}"]
    assert conclusion.sentences(figures | {"world_size": 2}, None)[1] == NEXT["zero1"]


def test_a_run_without_messages_names_its_own_pattern_and_no_transport():
    traffic = {Entry("broadcast", "tree"): Traffic(0, 0)}
    assert pattern_and_transport(traffic, "ring") == {"pattern": "ring", "transport": "none (one rank)"}
    assert median([None, 3.0, 1.0]) == 2.0 and median([None]) is None


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


def test_a_comparison_simulates_the_link_that_containers_would_have(monkeypatch):
    assert compare.with_link("--steps 3") == "--steps 3"
    monkeypatch.setenv("LINK", "20mbit")
    assert compare.with_link("") == "--link 20mbit"
    monkeypatch.setenv("LINK_DELAY", "2ms")
    assert compare.with_link("--steps 3") == "--steps 3 --link 20mbit,2ms"
    with pytest.raises(WorkbookError, match="give one of them"):
        compare.with_link("--link=1gbit")
    monkeypatch.setenv("LINK", "")
    with pytest.raises(WorkbookError, match="with a rate"):
        compare.with_link("")


@pytest.mark.parametrize(
    ("text", "is_on"), [("", False), ("0", False), ("no", False), ("False", False), ("1", True), ("on", True)]
)
def test_containers_are_started_only_where_the_setting_says_yes(monkeypatch, text, is_on):
    monkeypatch.setenv("CONTAINERS", text)
    assert compare.is_on("CONTAINERS") == is_on
    monkeypatch.setenv("CONTAINERS", "4")
    with pytest.raises(WorkbookError, match="CONTAINERS is '4'; it must be 1 or 0"):
        compare.is_on("CONTAINERS")


def test_a_comparison_in_containers_without_docker_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(compare.shutil, "which", lambda name: None)
    with pytest.raises(WorkbookError, match="needs Docker"):
        compare.main(["zero1", "zero2"], "", in_containers=True)
