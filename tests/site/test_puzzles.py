"""The page of puzzles judges as its rules in Python do, and every puzzle can be solved."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.run_modes import ROOT
from tests.site.puzzle_solutions import SOLUTIONS

sys.path.insert(0, str(ROOT / "site"))
from puzzles.puzzles import PUZZLES
from puzzles.rules import judge

Table = list[list[str]]
PUZZLE = {puzzle["name"]: puzzle for puzzle in PUZZLES}


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "puzzles.html"


def solution(name: str) -> Table:
    rows = [line.split() for line in SOLUTIONS[name].strip().splitlines()]
    return [["" if job == "." else job for job in row] for row in rows]


@pytest.mark.parametrize("name", PUZZLE)
def test_every_puzzle_can_be_solved_within_its_budget(name: str):
    puzzle, verdict = PUZZLE[name], judge(PUZZLE[name], solution(name))
    assert verdict["solved"] and verdict["steps"] >= puzzle["fewest"]
    tight = judge(
        puzzle | {"budget": {"steps": verdict["steps"] - 1, "memory": verdict["peak"]}}, solution(name)
    )
    assert not tight["solved"]
    tight = judge(puzzle | {"budget": {"steps": 99, "memory": verdict["peak"] - 0.5}}, solution(name))
    assert not tight["solved"] and tight["over"]


def changed(puzzle: dict[str, Any], table: Table, chance: random.Random) -> Table:
    """Return the table with a few random changes, some of which are no jobs at all."""
    rows = [[*row, *[""] * (20 - len(row))] for row in table]
    known = [
        *{job for row in rows for job in row},
        "-w0",
        "-w1",
        "-g0",
        "AGg0",
        "AGw1",
        "x1a>1",
        "d1a>0",
        "-x1a",
        "B0b",
        "F9a",
    ]
    for _ in range(chance.randrange(5)):
        row, step = chance.randrange(len(rows)), chance.randrange(16)
        match chance.randrange(4):
            case 0:
                rows[row][step] = chance.choice(known)
            case 1:
                other = chance.choice([step + 1, chance.randrange(16)])
                rows[row][step], rows[row][other] = rows[row][other], rows[row][step]
            case 2:
                for each in rows if chance.random() < 0.5 else [rows[row]]:
                    each.insert(step, "")
            case 3:
                rows[row][step : step + 1] = []
    return rows


def test_the_page_judges_a_thousand_tables_as_the_rules_in_python_do(browser: Browser, page: Path):
    browser.open(page)
    chance = random.Random(0)
    tables = []
    for _ in range(1000):
        name = chance.choice(list(PUZZLE))
        tables.append((name, changed(PUZZLE[name], solution(name), chance)))
    of_page = json.loads(
        browser.js(
            f"JSON.stringify({json.dumps(tables)}.map(([name, rows]) =>"
            " judge(puzzles.find(each => each.name === name), rows)))"
        )
    )
    reasons = set()
    for (name, table), shown in zip(tables, of_page, strict=True):
        expected = judge(PUZZLE[name], table)
        assert shown == expected, (name, table)
        reasons.add(re.sub(r"[0-9a-d]+", "", (expected["problem"] or {"why": ""})["why"]))
    assert len(reasons) > 20, "the tables have many kinds of mistakes"
    assert 100 < sum(shown["solved"] for shown in of_page) < 500


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
