"""The page of puzzles judges tables by its rules, and every puzzle can be solved."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.run_modes import ROOT
from tests.site.puzzle_solutions import SOLUTIONS

sys.path.insert(0, str(ROOT / "site"))
from puzzles.puzzles import PUZZLES

Table = list[list[str]]
PUZZLE = {puzzle["name"]: puzzle for puzzle in PUZZLES}


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "puzzles.html"


def solution(name: str) -> Table:
    rows = [line.split() for line in SOLUTIONS[name].strip().splitlines()]
    return [["" if job == "." else job for job in row] for row in rows]


def judge(browser: Browser, puzzle: dict[str, Any], table: Table) -> dict[str, Any]:
    """Return what the page says of a table."""
    return browser.json(f"judge({json.dumps(puzzle)}, {json.dumps(table)})")


def table_of(text: str) -> Table:
    rows = [line.split() for line in text.split("|")]
    return [["" if job == "." else job for job in row] for row in rows]


def test_every_puzzle_can_be_solved_within_its_budget(browser: Browser, page: Path):
    browser.open(page)
    for name, puzzle in PUZZLE.items():
        verdict = judge(browser, puzzle, solution(name))
        assert verdict["solved"] and verdict["steps"] >= puzzle["fewest"], name
        fewer = puzzle | {"budget": {"steps": verdict["steps"] - 1, "memory": verdict["peak"]}}
        assert not judge(browser, fewer, solution(name))["solved"], name
        less = puzzle | {"budget": {"steps": 99, "memory": verdict["peak"] - 0.5}}
        tight = judge(browser, less, solution(name))
        assert not tight["solved"] and tight["over"], name


def test_memory_is_what_a_rank_holds_from_the_start_of_a_step_to_its_end(browser: Browser, page: Path):
    browser.open(page)
    # Weights of 4, then La, F0a and F1a make an activation each; B1a makes d1a and g1, and B0a makes g0.
    assert judge(browser, PUZZLE["one_step"], solution("one_step"))["memory"] == [[5, 6, 7, 10, 10, 8, 6]]
    # A half of the weights (2) and of the state (4) of each of three layers, and then an activation.
    assert judge(browser, PUZZLE["zero3"], table_of("|La||Lb"))["memory"] == [[10], [10]]
    # A shard of weights that are there is a part of them, so two layers take 2 x 2 and half of the state 4.
    assert judge(browser, PUZZLE["zero1"], table_of("|La||Lb"))["memory"] == [[9], [9]]


MISTAKES = (
    ("one_step", "F0a", "rank 0 has no x0a."),
    ("one_step", "F9a", "F9a is no job of this puzzle."),
    ("one_step", "La", "La belongs into the row of what the rank moves."),
    ("one_step", "|La La", "rank 0 has x0a already."),
    ("one_step", ". U0|La", "U0 needs g0 with a, and rank 0 has nothing."),
    ("one_step", ". F0a F1a B1a U1 F0a F1a|La", "w1 is updated already: a step uses the old weights."),
    ("one_step", ". F0a F1a B1a F0a F1a B1a|La", "a is in g1 already: it would count twice."),
    ("one_step", ". F0a F1a B1a|La . . -d2a", "both jobs of rank 0 change d2a in this step."),
    ("one_step", "|-w0", "w0 would be lost: no shard of it is left."),
    ("one_step", "|AGw0", "no other rank has layer 0."),
    ("data_parallel", ". F0a F1a B1a U1|La", "U1 needs g1 with ab, and rank 0 has a."),
    ("data_parallel", "|AGg0", "rank 0 has no shard of g0."),
    (
        "data_parallel",
        ". F0a F1a B1a|La . . . RSg1",
        "all ranks with layer 1 do RSg1 in one step; rank 1 does not.",
    ),
    (
        "data_parallel",
        ". F0a F1a B1a|La . . . RSg1|. F0a F1a B1a|La . . . RSg1",
        "a would count twice in the sum of g1.",
    ),
    ("zero1", "|AGw0", "rank 0 has w0 already."),
    ("zero1", "U1", "U1 needs its shard of g1 with ab, and rank 0 has nothing."),
    (
        "zero1",
        ". F0a F1a B1a . U1|La . . . RSg1 . AGw1|. F0b F1b B1b|Lb . . . RSg1 -w1 AGw1",
        "the shards of w1 differ: some ranks have gone further than others.",
    ),
    ("pipeline", "U1", "layer 1 is not on rank 0."),
    ("pipeline", "|La x0a>0", "a rank cannot send to itself."),
    ("pipeline", "|La x0a>1 La x0a>1", "rank 1 has x0a already."),
    ("sharded_stages", "|La x0a>2||Lb x0b>2", "two messages to rank 2 in one step: its link takes one."),
    ("sharded_stages", "|La x0a>1||. La", "x0a arrives on rank 1, which makes it in this step."),
)


def test_the_first_mistake_in_a_table_is_named(browser: Browser, page: Path):
    browser.open(page)
    for name, text, sentence in MISTAKES:
        verdict = judge(browser, PUZZLE[name], table_of(text))
        assert verdict["problem"]["why"] == sentence, (name, text)
        assert not verdict["solved"] and verdict["left"]


def test_what_is_missing_at_the_end_is_named(browser: Browser, page: Path):
    browser.open(page)
    one_update = ". F0a F1a B1a . U1|La . . . RSg1|. F0b F1b B1b|Lb . . . RSg1"
    cases = {"": "not updated", "|-w1": "not gathered", one_update: "updated in one shard only"}
    for text, how in cases.items():
        assert f"w1 of rank 0 is {how}" in judge(browser, PUZZLE["zero1"], table_of(text))["left"]


def test_a_table_is_written_with_the_buttons_kept_and_shared_by_its_link(browser: Browser, page: Path):
    browser.open(page, "puzzle=one_step")
    browser.js("localStorage.clear()")
    browser.open(page, "puzzle=one_step")
    jobs = [(1, 0, "La"), *((0, step, job) for step, job in enumerate(solution("one_step")[0]) if job)]
    for row, step, job in jobs:
        browser.click(f'#grid [data-row="{row}"][data-step="{step}"]')
        browser.click(f'#possible [value="{job}"]')
    assert browser.js("verdict.textContent") == "Solved in 7 steps with a memory of 10."
    address = browser.js("location.hash.slice(1)")
    browser.open(page)
    assert browser.js("document.querySelector('#puzzle label').textContent") == "1 ✓"
    browser.js("localStorage.clear()")
    browser.open(page, address)
    assert browser.js("verdict.textContent").startswith("Solved in 7 steps")


def test_a_collective_is_put_on_all_ranks_of_its_layer_and_a_mistake_is_named(browser: Browser, page: Path):
    browser.open(page, "puzzle=zero3&table=. . F0a|La")
    assert browser.js("verdict.textContent").startswith("Step 3, rank 0: rank 0 has no w0")
    browser.click('#grid [data-row="1"][data-step="1"]')
    browser.click('#possible [value="AGw0"]')
    rows = "[1, 3].map(row => document.querySelector(`[data-row='${row}'][data-step='1']`).textContent)"
    assert browser.js(rows) == ["AGw0", "AGw0"]
    browser.click('#edits [value="undo"]')
    assert browser.js(rows) == ["", ""]


def test_a_solved_puzzle_leads_to_the_next_and_start_again_to_step_1(browser: Browser, page: Path):
    browser.resize(400, 700, mobile=True)
    rows = [line.strip() for line in SOLUTIONS["one_step"].strip().splitlines()]
    browser.open(page, f"puzzle=one_step&table={'|'.join(rows)}")
    browser.js("document.getElementById('scroll').scrollLeft = 500")
    browser.click('#edits [value="restart"]')
    assert browser.js("[$('scroll').scrollLeft, state.step, next.hidden]") == [0, 0, True]
    browser.click('#edits [value="undo"]')
    browser.click("#next")
    assert browser.js("state.puzzle.name") == PUZZLES[1]["name"]
    browser.resize(1280, 800)


def test_another_puzzle_or_a_smaller_table_has_a_chosen_cell(browser: Browser, page: Path):
    chosen = (
        "[...document.querySelectorAll('#grid .chosen')].map(({ dataset: { row, step } }) => [row, step])"
    )
    browser.open(page, "puzzle=recompute&table=. . . . . . . . . . . . . . . . . . . . . U0")
    browser.js("choose(1, 21)")
    browser.click('#edits [value="restart"]')
    assert browser.js(chosen) == [["1", "0"]]
    browser.js("choose(1, 17)")
    browser.click('#puzzle [value="one_step"]')
    assert browser.js(chosen) == [["1", "0"]]
    browser.click('#edits [value="restart"]')
    browser.click('#possible [value="La"]')
    assert browser.js(chosen) == [["0", "1"]], "there the forward can run"
    assert browser.errors == []


def test_the_jobs_of_a_row_are_those_that_can_help(browser: Browser, page: Path):
    browser.open(page)
    for name, puzzle in PUZZLE.items():
        for row, used in enumerate(solution(name)):
            call = f"jobsOf(puzzles.find(each => each.name === {name!r}), {row // 2}, {row % 2})"
            offered = browser.js(call)
            assert {job for job in used if job} <= set(offered), name
            assert not [job for job in offered if job.endswith(f">{row // 2}")], "no rank sends to itself"
            assert len(offered) < 40, puzzle["title"]
