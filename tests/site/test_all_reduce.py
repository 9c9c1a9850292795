"""The page of an all-reduce shows the messages of comm/algorithms and the numbers of comm/cost.py."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from comm import cost
from comm.algorithms import hypercube, ring, star, tree
from tests.browser import Browser

ALGORITHMS = {
    "flat": star.all_reduce,
    "tree": tree.all_reduce,
    "ring": ring.all_reduce,
    "recursive_doubling": hypercube.recursive_doubling,
    "halving_doubling": hypercube.halving_doubling,
}
LINK = cost.Link(alpha=50e-6, beta=8e-9 / 10)  # as the page opens


class Transfer:
    """A message that has left or has still to arrive."""

    def __init__(self, tensor: torch.Tensor, source: queue.Queue | None = None) -> None:
        self.tensor, self._source = tensor, source

    def wait(self) -> None:
        if self._source is not None:
            self.tensor.copy_(self._source.get(timeout=20))


class RecordingWire:
    """Offers what algorithms use of comm.wire.wire.Wire, and lists (to, elements) of each send."""

    def __init__(self, rank: int, size: int, links: dict[tuple[int, int], queue.Queue]) -> None:
        self.rank, self.size, self._links = rank, size, links
        self.sent: list[tuple[int, int]] = []

    def isend(self, tensor: torch.Tensor, to: int) -> Transfer:
        self.sent.append((to, tensor.numel()))
        self._links[self.rank, to].put(tensor.clone())
        return Transfer(tensor)

    def irecv(self, tensor: torch.Tensor, source: int) -> Transfer:
        return Transfer(tensor, self._links[source, self.rank])


def sends_of(algorithm: Callable[..., Any], ranks: int, numel: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the (to, elements) of its sends in an all-reduce, in order."""
    links: dict[tuple[int, int], queue.Queue] = {
        (a, b): queue.Queue() for a in range(ranks) for b in range(ranks)
    }
    wires = [RecordingWire(rank, ranks, links) for rank in range(ranks)]
    tensors = [torch.full((numel,), float(rank)) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(lambda wire, tensor: algorithm(wire, tensor, "sum"), wires, tensors))
    assert all(tensor.eq(ranks * (ranks - 1) / 2).all() for tensor in tensors)
    return [wire.sent for wire in wires]


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "all_reduce.html"


def timeline(browser: Browser, name: str, ranks: int, numel: int) -> dict[str, Any]:
    call = f"timelineOf({name!r}, {ranks}, {numel}, 4, {LINK.alpha!r}, {LINK.beta!r})"
    return browser.json(call)


def fact(browser: Browser, name: str, kind: str) -> str:
    return browser.js(f"document.querySelector('[data-run={name}] .{kind}').textContent")


def type_into(browser: Browser, name: str, text: str) -> None:
    browser.js(f"document.getElementById({name!r}).select()")
    browser.call("Input.insertText", text=text)


def moment(browser: Browser) -> float:
    return float(browser.js("state.time"))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
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
    assert "flat up to 5.68 kB" in said, "2 (α + 7 B β) = 3 (α + B β)"


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
    while browser.js("document.activeElement.name") != "ranks":
        browser.key("Tab")
    browser.key("ArrowRight")
    for _ in range(2):
        browser.key("Tab")
    browser.key(" ")
    assert browser.js("document.activeElement.value") == "tree"
    link = browser.js("location.hash")
    browser.open(page, link[1:])
    assert browser.js("[state.ranks, state.shown]") == [12, ["tree", "ring"]]
