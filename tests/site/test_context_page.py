"""The page of ring attention shows its numbers, plays, and takes what is chosen and typed."""

from pathlib import Path

import pytest

from comm.cost import Link
from context_parallel.makespan import balanced_pairs, ring_seconds, step_pairs
from context_parallel.sequence_cut import CUTS
from tests.browser import Browser

LENGTH, SECONDS, LINK = 32768, 20e-3, Link(20e-6, 8e-9 / 400)  # as the page opens
TOKEN_BYTES = 2 * 8 * 128 * 2


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "context.html"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def fact(browser: Browser, kind: str) -> str:
    return browser.js(f"document.querySelector('#charts .{kind}').textContent")


def rows_of(browser: Browser, table: str) -> list[list[str]]:
    cells = "[...row.cells].map(cell => cell.textContent)"
    return browser.js(f"[...document.querySelectorAll('#{table} tbody tr')].map(row => {cells})")


def type_into(browser: Browser, name: str, text: str) -> None:
    field = f"document.getElementById('{name}')"
    browser.js(f"{field}.value = '{text}', {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def said(browser: Browser, name: str) -> str:
    return browser.js(f"document.getElementById('{name}').textContent")


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_figures_that_the_page_shows_are_those_of_the_lesson(
    browser: Browser, page: Path, name: str, ranks: int
):
    browser.open(page, f"cut={name}&ranks={ranks}&rate=400")
    cut = CUTS[name](LENGTH, ranks)
    per_pair = SECONDS / (LENGTH * (LENGTH + 1) / 2)
    block = max(map(cut.length, range(ranks))) * TOKEN_BYTES
    message, pairs = LINK.alpha + LINK.beta * block, step_pairs(cut)
    forward = sum(max(each * per_pair, message) for each in pairs[:-1]) + pairs[-1] * per_pair
    balanced = balanced_pairs(cut) * per_pair
    assert fact(browser, "makespan-formula") == milliseconds(forward)
    assert fact(browser, "balanced") == milliseconds(balanced)
    assert float(fact(browser, "ratio")) == pytest.approx(forward / balanced, rel=1e-3)
    if name == "contiguous":
        assert fact(browser, "ratio-formula") == f"{(2 * ranks - 1) / ranks:.4g}"
    steps = rows_of(browser, "steps")
    assert len(steps) == ranks and steps[-1][2:] == ["no message", steps[-1][1], "computing"]
    both = ring_seconds(pairs, per_pair, block, LINK)
    ring = rows_of(browser, "techniques")[0]
    assert ring[6].removesuffix("least") == milliseconds(both)
    words = said(browser, "steps-words")
    assert f"The forward takes {milliseconds(forward)}" in words
    assert f"it takes {milliseconds(both - forward)}." in words


def test_with_contiguous_pieces_rank_0_waits_for_the_last_rank_and_with_zigzag_no_rank_waits(
    browser: Browser, page: Path
):
    browser.open(page, "time=0.0026")
    states = rows_of(browser, "states")
    nothing = "computes nothing, because these keys are later than its queries, and "
    assert states[0] == [
        *("rank 0", "3", "rank 2", f"{nothing}waits for keys of rank 1 from rank 3", "1.25 ms", "3.191 ms"),
    ]
    assert states[3] == ["rank 3", "2", "rank 2", "computes 1 block", "8.75 ms", "0 s"]
    browser.js("document.querySelector('[value=zigzag]').click()")
    assert [row[-2:] for row in rows_of(browser, "states")] == [["5 ms", "0 s"]] * 4
    assert browser.js("document.querySelectorAll('#charts rect.waiting').length") == 0


def test_the_blocks_that_are_computed_now_are_those_of_the_ranks_steps(browser: Browser, page: Path):
    browser.open(page, "ranks=3&cut=zigzag&length=6000&time=0")
    blocks = (
        "[...document.querySelectorAll('#matrix .now')].map(each => [+each.dataset.rank, +each.dataset.step])"
    )
    for step in range(3):
        browser.js(f"seek(shown.timeline.rows[0][{step}].begin + 1e-9)")
        parts = [
            (rank, part)
            for rank in range(3)
            for part in CUTS["zigzag"](6000, 3).parts(rank, (rank - step) % 3)
        ]
        assert browser.js(blocks) == [[rank, step] for rank, _ in parts]
        kept = [f"kv {(rank - step) % 3}" for rank in range(3)]
        shown = "[...document.querySelectorAll('#ring .visiting + text')].map(each => each.textContent)"
        assert browser.js(shown) == kept
        arrows = 3 if step < 2 else 0
        assert browser.js("document.querySelectorAll('#ring .arc.busy').length") == arrows
        parcels = "[...document.querySelectorAll('#ring .parcel text')].map(each => each.textContent)"
        assert browser.js(parcels) == (kept if arrows else [])
    browser.js("seek(horizon)")
    everything = browser.js("document.querySelectorAll('#matrix .block').length")
    assert everything == browser.js("document.querySelectorAll('#matrix .done').length") == 21


def test_masked_blocks_are_empty_and_without_a_mask_all_are_computed(browser: Browser, page: Path):
    area_of = (
        "(({points}) => Math.abs(sum([...points].map((a, i) => { "
        "const b = points[(i + 1) % points.length]; return a.x * b.y - b.x * a.y; }))) / 2)"
    )
    area = f"sum([...document.querySelectorAll('#matrix .block')].map({area_of})) / (SIDE - MARGIN) ** 2"
    for cut in CUTS:
        browser.open(page, f"ranks=5&cut={cut}")
        assert browser.js(area) == pytest.approx(0.5, rel=1e-3)
        browser.open(page, f"ranks=5&cut={cut}&mask=none")
        assert browser.js(area) == pytest.approx(1, rel=1e-3)
        assert fact(browser, "ratio") == "1"


def test_it_plays_by_click_and_by_keyboard_and_steps_through_what_begins_and_ends(
    browser: Browser, page: Path
):
    browser.open(page, "time=0")
    browser.click("#play")
    browser.until("state.time > 0.02 * horizon")
    browser.key(" ")  # the button has the focus, but not by keyboard
    stopped = browser.js("state.time")
    browser.js("new Promise(done => setTimeout(done, 100))")
    assert browser.js("state.time") == stopped
    browser.key("Home")
    words = "document.querySelector('#charts .words').textContent"
    heard = [browser.js(words)]
    for _ in range(3):
        browser.key("ArrowRight")
        heard.append(browser.js(words))
    assert heard == [
        "Step 1 of 4. 4 ranks compute, 4 messages are on their way.",
        "Step 1 of 4. 4 ranks compute.",
        "Step 2 of 4. 3 ranks compute, 1 rank waits, 4 messages are on their way.",
        "Steps 2 and 3 of 4. 3 ranks compute, 1 rank waits.",
    ]
    browser.key("End")
    assert browser.js(words) == "Done. All queries have met all keys."
    assert {row[3] for row in rows_of(browser, "states")} == {"done"}


def test_a_link_that_is_slow_exposes_messages_whatever_the_cut(browser: Browser, page: Path):
    browser.open(page, "cut=zigzag&rate=40")
    assert [row[4] for row in rows_of(browser, "steps")] == ["the message"] * 3 + ["computing"]
    assert "all ranks wait" in said(browser, "tried")
    assert float(fact(browser, "ratio")) > 4


def test_a_message_of_the_formula_has_the_longest_block(browser: Browser, page: Path):
    browser.open(page, "ranks=7&cut=contiguous&length=16&alpha=0&rate=1&compute=0.001")
    block = 3 * TOKEN_BYTES  # two ranks have three tokens, the others two
    assert {row[2] for row in rows_of(browser, "steps")[:-1]} == {f"{block * 8e-9 * 1e6:.4g} µs"}
    assert f"{block / 1e3:.4g} kB" in said(browser, "given")


def test_the_table_names_what_is_least_and_what_is_not_possible(browser: Browser, page: Path):
    browser.open(page, "ranks=3&heads=32&kvHeads=8")
    ring, exchange, sequence = rows_of(browser, "techniques")
    assert "not possible: 3 does not divide the 8 heads" in exchange[0] and exchange[2] == sequence[2] == "–"
    assert ring[2] == f"{6 * 2 / 3 * LENGTH * 1024 * 2 / 1e6:.4g} MBleast"
    browser.open(page, "ranks=4&heads=32&kvHeads=8")
    ring, exchange, sequence = rows_of(browser, "techniques")
    assert exchange[2] == f"{4 * 3 / 16 * LENGTH * (4096 + 1024) * 2 / 1e6:.4g} MBleast"
    assert sequence[2] == f"{8 * 3 / 4 * LENGTH * 4096 * 2 / 1e9:.4g} GB"
    assert sequence[4] == "in part" and exchange[4] == "0 s" and sequence[7] == "none"
    assert "all-to-all attention sends least in attention" in said(browser, "least")
    browser.open(page, "ranks=2&heads=32&kvHeads=8&cut=zigzag")
    assert said(browser, "least").startswith(
        "For these sizes ring attention sends least in attention and takes least time by formula."
    )
    browser.open(page, "ranks=2&heads=32&kvHeads=8&cut=contiguous&compute=1")
    assert said(browser, "least").startswith(
        "For these sizes ring attention sends least in attention, and all-to-all attention takes least time"
    )


def test_what_to_try_sets_all_settings_and_says_what_can_be_seen(browser: Browser, page: Path):
    browser.open(page, "ranks=7&length=777&batch=3")
    assert said(browser, "tried") == ""
    hits = []
    for i in range(browser.js("TRIES.length")):
        browser.click(f"#tries [value='{i}']")
        pressed = "[...document.querySelectorAll('#tries [aria-pressed=true]')].map(each => +each.value)"
        assert browser.js(pressed) == [i] and browser.js("batch.value") == "1"
        hits.append((browser.js("state.cut"), float(fact(browser, "ratio"))))
        assert said(browser, "tried")
    assert [cut for cut, _ in hits] == ["contiguous", *["zigzag"] * 3, "contiguous", "zigzag"]
    assert hits[0][1] == 1.75 and hits[1][1] == 1 and hits[2][1] > 4 and hits[3][1] == hits[4][1] == 1


def test_what_is_no_number_or_does_not_divide_is_refused_in_a_sentence(browser: Browser, page: Path):
    browser.open(page, "ranks=2&cut=zigzag")
    before = fact(browser, "makespan")
    for name, wrong, sentence in (
        ("compute", "x", "causal attention on one rank: give a number from 1 µs to 100000 s."),
        ("batch", "1.5", "batch: give a whole number from 1 to 1000000."),
        ("kvHeads", "7", "heads of keys and values: give a number that divides the number of query heads."),
    ):
        right = browser.js(f"document.getElementById('{name}').value")
        type_into(browser, name, wrong)
        assert said(browser, "complaint") == sentence
        assert browser.js(f"document.getElementById('{name}').getAttribute('aria-invalid')") == "true"
        assert fact(browser, "makespan") == before
        type_into(browser, name, right)
        assert said(browser, "complaint") == ""
        assert browser.js(f"document.getElementById('{name}').getAttribute('aria-invalid')") == "false"


def test_a_link_opens_what_its_author_saw(browser: Browser, page: Path):
    browser.open(page)
    for choice in (
        "[name=ranks][value='6']",
        "[name=cut][value=zigzag]",
        "[name=mask][value=none]",
        "[name=itemsize][value='4']",
    ):
        browser.js(f'document.querySelector("{choice}").click()')
    type_into(browser, "alpha", "75")
    seen = browser.js("JSON.stringify([state.ranks, state.cut, state.mask, state.itemsize, state.alpha])")
    browser.open(page, browser.js("location.hash")[1:])
    assert (
        browser.js("JSON.stringify([state.ranks, state.cut, state.mask, state.itemsize, state.alpha])")
        == seen
    )
    assert seen == '[6,"zigzag","none",4,0.000075]'
