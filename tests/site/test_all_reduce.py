"""The page of an all-reduce shows the messages of comm/algorithms and the numbers of comm/cost.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from comm import cost
from comm.algorithms import hypercube, ring, star, tree
from tests.browser import Browser
from tests.site.recorded_messages import sends_of

ALGORITHMS = {
    "flat": star.all_reduce,
    "tree": tree.all_reduce,
    "ring": ring.all_reduce,
    "recursive_doubling": hypercube.recursive_doubling,
    "halving_doubling": hypercube.halving_doubling,
}
LINK = cost.Link(alpha=50e-6, beta=8e-9 / 10)  # as the page opens


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "all_reduce.html"


def timeline(browser: Browser, name: str, ranks: int, numel: int) -> dict[str, Any]:
    call = f"timelineOf({name!r}, {ranks}, {numel}, 4, {LINK.alpha!r}, {LINK.beta!r})"
    return json.loads(browser.js(f"JSON.stringify({call})"))


def fact(browser: Browser, name: str, kind: str) -> str:
    return browser.js(f"document.querySelector('[data-run={name}] .{kind}').textContent")


def type_into(browser: Browser, name: str, text: str) -> None:
    browser.js(f"document.getElementById({name!r}).select()")
    browser.call("Input.insertText", text=text)


def moment(browser: Browser) -> float:
    return float(browser.js("state.time"))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_the_page_sends_the_messages_of_the_algorithms(browser: Browser, page: Path, name: str, ranks: int):
    browser.open(page)
    for numel in (1, 50, 240):
        shown: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for each in (
            one for turn in timeline(browser, name, ranks, numel)["rounds"] for one in turn["messages"]
        ):
            shown[each["from"]].append((each["to"], each["end"] - each["begin"]))
        assert shown == sends_of(ALGORITHMS[name], ranks, numel)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_messages_and_seconds_are_those_of_the_cost_formulas(browser: Browser, page: Path, name: str):
    browser.open(page)
    for ranks in (2, 3, 4, 6, 8, 12, 16):
        for numel in (48, 240_000, 50_000_017):
            shown = timeline(browser, name, ranks, numel)
            expected = [cost.traffic("all_reduce", name, numel, 4, ranks, rank) for rank in range(ranks)]
            assert [each["bytes"] for each in shown["sent"]] == [each.bytes_sent for each in expected]
            if numel * 4 <= 1 << 20:  # our algorithms send larger tensors in segments
                assert [each["messages"] for each in shown["sent"]] == [
                    each.messages_sent for each in expected
                ]
            seconds = cost.seconds("all_reduce", name, numel * 4, ranks, LINK)
            by_formula = browser.js(
                f"ALGORITHMS.{name}.seconds({ranks}, {LINK.alpha!r}, {numel} * 4 * {LINK.beta!r})"
                f" + headerSeconds({ranks}, {LINK.alpha!r})"
            )
            assert by_formula == pytest.approx(seconds, rel=1e-9)
            headers = cost.header_traffic(ranks).messages_sent * LINK.alpha
            exact = numel % 48 == 0  # otherwise some chunks have an element more
            assert shown["seconds"] + headers == pytest.approx(seconds, rel=1e-9 if exact else 1e-6)


def test_the_figures_that_the_page_shows_are_those_numbers(browser: Browser, page: Path):
    browser.open(page, "ranks=4&size=8e6&alpha=1e-3&rate=1&show=" + ",".join(ALGORITHMS))
    link = cost.Link(1e-3, 8e-9)
    for name in ALGORITHMS:
        seconds = cost.seconds("all_reduce", name, 8_000_000, 4, link)
        most = max(cost.traffic("all_reduce", name, 2_000_000, 4, 4, rank).bytes_sent for rank in range(4))
        shown = {kind: fact(browser, name, kind) for kind in ("with-headers", "time", "time-formula")}
        assert shown["with-headers"] == f"{seconds * 1e3:.4g} ms"
        assert shown["time"] == shown["time-formula"] == f"{(seconds - 2e-3) * 1e3:.4g} ms"
        assert fact(browser, name, "bytes") == fact(browser, name, "bytes-formula") == f"{most / 1e6:.4g} MB"


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_at_the_end_every_rank_has_the_sum_of_all_and_before_it_some_rank_has_not(
    browser: Browser, page: Path, ranks: int
):
    browser.open(page, f"ranks={ranks}&show={','.join(ALGORITHMS)}")
    complete = "[...document.querySelectorAll('figure')].map(each => !each.querySelector('.nodes .partial'))"
    assert not any(browser.js(f"seek(0), {complete}"))
    assert all(browser.js(f"seek(horizon), {complete}"))
    for name in ALGORITHMS:
        almost = browser.js(
            f"(() => {{ const t = timelineOf('{name}', {ranks}, 4800, 4, 1e-5, 1e-9);"
            " return contentsAt(t, bordersOf(t), t.seconds * 0.999).flat(); })()"
        )
        assert any(bits != 2**ranks - 1 for bits in almost)


def test_the_messages_of_the_round_are_listed_with_what_is_in_them(browser: Browser, page: Path):
    browser.open(page, "show=ring&ranks=4&size=160&alpha=1e-3&rate=1&time=0")
    browser.click("summary")
    cells = "[...row.cells].map(cell => cell.innerText)"
    rows = f"[...document.querySelectorAll('details tbody tr')].map(row => {cells})"
    browser.until(f"{rows}.length === 4")
    assert json.loads(browser.js(f"JSON.stringify({rows}[0])")) == [
        *("0 \u2192 1", "30 to 39", "40 bytes", "its own values", "adds", "0 s", "1 ms"),
    ]
    browser.js("document.activeElement.blur()")
    contents = []
    for _ in range(5):
        browser.key("ArrowRight")
        contents.append(browser.js(f"{rows}[0][3] + ', ' + {rows}[0][4]"))
    assert contents == [
        "the sum of 2 ranks, adds",
        "the sum of 3 ranks, adds",
        *3 * ["the sum of all ranks, copies"],
    ]
    browser.key("End")
    assert browser.js("document.querySelector('details table').innerText") == "There are none now."


def test_a_message_in_flight_is_drawn_as_the_part_of_the_tensor_that_it_carries(browser: Browser, page: Path):
    browser.open(page, "show=halving_doubling&ranks=4")
    shown = (
        "[...document.querySelectorAll('.parcel')].map(each => [...each.children].map(part => "
        "Number(part.getAttribute('width'))))"
    )
    ends = browser.js("charts[0].timeline.rounds.map(({begin, end}) => (begin + end) / 2)")
    for middle, share in zip(ends, (1 / 2, 1 / 4, 1 / 4, 1 / 2), strict=True):
        parcels = browser.js(f"seek({middle}), {shown}")
        assert [part / full for full, part in parcels] == pytest.approx([share] * 4, rel=1e-2)


def test_a_round_says_what_its_messages_cost_and_which_wait_for_a_link(browser: Browser, page: Path):
    words = "document.querySelector('.words').innerText"
    browser.open(page, "show=ring&ranks=4&size=4e6&alpha=1e-3&rate=8&time=0")
    assert browser.js(words).endswith("4 messages of 1 MB: \u03b1 + b \u03b2 = 1 ms + 1 ms.")
    browser.open(page, "show=flat&ranks=4&size=4e6&alpha=1e-3&rate=8&time=0")
    assert browser.js(words).endswith("= 1 ms + 4 ms each, one after the other over one link: 13 ms in all.")


def test_the_fastest_of_each_size_is_that_of_the_cost_formulas(browser: Browser, page: Path):
    browser.open(page, "ranks=8")
    said = browser.js("document.getElementById('fastest').textContent")
    borders = {"flat": (100, 5000), "recursive doubling": (7000, 140_000), "halving-doubling": (170_000, 1e9)}
    for title, sizes in borders.items():
        assert title in said
        for size in sizes:
            times = {name: cost.seconds("all_reduce", name, int(size), 8, LINK) for name in ALGORITHMS}
            name = title.replace(" ", "_").replace("-", "_")
            assert times[name] == pytest.approx(min(times.values()))


def test_it_plays_by_click_and_by_keyboard_and_steps_from_round_to_round(browser: Browser, page: Path):
    browser.open(page, "show=ring&ranks=4&time=0")
    browser.click("#play")
    browser.until("state.time > 0.02 * horizon")
    browser.key(" ")  # the button has the focus, but not by keyboard
    stopped = moment(browser)
    browser.js("new Promise(done => setTimeout(done, 100))")
    assert moment(browser) == stopped
    browser.key("Home")
    ends = browser.js("timelineOf('ring', 4, 250000, 4, state.alpha, beta()).rounds.map(({end}) => end)")
    for end in ends[:3]:
        browser.key("ArrowRight")
        assert moment(browser) == pytest.approx(end)
    words = browser.js("document.querySelector('.words').textContent")
    assert words.startswith("Round 4 of 6. All-gather, step 1 of 3")
    browser.key("End")
    assert browser.js("document.querySelector('.words').textContent").startswith("Done.")


def test_sizes_and_speeds_are_typed_and_what_is_no_number_is_refused_in_a_sentence(
    browser: Browser, page: Path
):
    browser.open(page, "show=ring&ranks=2")
    type_into(browser, "size", "16")
    type_into(browser, "alpha", "0")
    type_into(browser, "rate", "1")
    assert fact(browser, "ring", "time") == "128 ms"
    for wrong in ("", "x", "-3", "0", "1e99"):
        type_into(browser, "size", wrong) if wrong else browser.js(
            "size.value = '', size.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        complaint = browser.js("document.getElementById('complaint').textContent")
        assert complaint == "tensor B: give a number from 4 bytes to 1 TB."
        assert browser.js("size.getAttribute('aria-invalid')") == "true"
        assert fact(browser, "ring", "time") == "128 ms"
    type_into(browser, "size", "32")
    assert fact(browser, "ring", "time") == "256 ms"
    assert browser.js("document.getElementById('complaint').textContent") == ""


def test_settings_are_reached_by_tab_and_a_link_opens_them_again(browser: Browser, page: Path):
    browser.open(page, "ranks=8&show=ring")
    browser.key("Tab")
    browser.key("ArrowRight")
    for _ in range(2):
        browser.key("Tab")
    browser.key(" ")
    assert browser.js("document.activeElement.value") == "tree"
    link = browser.js("location.hash")
    browser.open(page, link[1:])
    assert browser.js("[state.ranks, state.shown]") == [12, ["tree", "ring"]]
