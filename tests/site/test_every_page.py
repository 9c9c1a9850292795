"""What holds for every page to play with: one file, on any width, by keyboard, in light and dark."""

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.browser import Browser

# Each page with settings that show as much as the page can.
FULL = {
    "schedules": "ranks=4&microbatches=16&show=naive,gpipe,1f1b,interleaved,zb_h1,zb_v,dualpipe_v",
    "all_reduce": "ranks=16&show=flat,tree,ring,recursive_doubling,halving_doubling",
    "calculator": "keepsAttention=true&recompute=stages&layers=10000&width=100000",
    "context": "ranks=8&cut=zigzag&mask=none&kvHeads=32",
    "puzzles": "puzzle=sharded_stages&table=La AGw0 F0a|Lb",
}


@pytest.fixture(params=FULL)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def page(pages: Path, name: str) -> Path:
    return pages / f"{name}.html"


def test_a_page_is_one_file_that_names_no_other(browser: Browser, page: Path):
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|\bfetch\b|XMLHttpRequest|WebSocket|\bimport\b|url\(|@import|{{", text)
    assert "default-src 'none'" in text
    browser.open(page)
    browser.js("new Promise(done => setTimeout(done, 100))")
    assert browser.requests == [page.as_uri()]
    assert browser.js("document.querySelectorAll('a').length") == 0, "alone, a page has nothing to link to"


@pytest.mark.parametrize("width", [320, 1280])
def test_no_width_is_too_narrow(browser: Browser, page: Path, name: str, width: int):
    browser.resize(width, 700, mobile=width < 700)
    browser.open(page, FULL[name])
    assert browser.js("document.documentElement.scrollWidth") <= width
    rights = "[...document.querySelectorAll('svg, svg *')].map(each => each.getBoundingClientRect().right)"
    assert browser.js(f"Math.max(0, ...{rights})") <= width


def test_tab_reaches_every_control_and_shows_where_it_is(browser: Browser, page: Path, name: str):
    browser.open(page, FULL[name])
    # Tab reaches one radio button of those with the same name; a schedule's cell has a frame, not an outline.
    browser.js("window.keyOf = (each) => (each.type === 'radio' ? each.name : each), 0")
    controls = (
        "[...document.querySelectorAll('button, input, select, summary')].filter(e => e.checkVisibility())"
    )
    assert browser.js(f"window.left = new Set({controls}.map(keyOf)), left.size") > 5
    for _ in range(browser.js("left.size") + 20):
        browser.key("Tab")
        browser.js("left.delete(keyOf(document.activeElement))")
        shown = "(document.activeElement.closest('fieldset label') ?? document.activeElement)"
        assert browser.js(
            f"getComputedStyle({shown}).outlineStyle !== 'none' || {shown}.matches('body, .cell')"
        )
    assert browser.js("[...left].map(each => each.outerHTML ?? each)") == []


def after_reload(browser: Browser) -> None:
    """Wait until the page is another one than that in which `isOld` was set."""
    deadline, is_new = time.monotonic() + 60, False
    while not is_new:
        assert time.monotonic() < deadline
        with contextlib.suppress(RuntimeError):  # it is being loaded
            is_new = browser.js("window.isOld === undefined && document.readyState === 'complete'")


def test_what_to_try_opens_with_its_settings_and_says_what_can_be_seen(
    browser: Browser, page: Path, name: str
):
    browser.open(page)
    number = browser.js("document.querySelectorAll('#tries button').length")
    for i in range(number):
        browser.js(f"window.isOld = true, document.querySelectorAll('#tries button')[{i}].click()")
        after_reload(browser)
        pressed = (
            "[...document.querySelectorAll('#tries [aria-pressed=true]')].map(each => each.dataset.words)"
        )
        assert browser.js(pressed) == [browser.js("tried.textContent")] != [""]
    assert number >= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_have_contrast(browser: Browser, page: Path, scheme: str):
    """The ratio of luminances is at least 4.5, as in https://www.w3.org/TR/WCAG21/#contrast-minimum."""
    browser.prefer(scheme)
    browser.open(page)
    colors = "['color', 'backgroundColor'].map(each => getComputedStyle(document.querySelector(%r))[each])"
    for inks, paper in (("header p", "body"), ("h1", "body"), ("legend", "body"), ("button", "button")):
        ink, back = browser.js(colors % inks)[0], browser.js(colors % paper)[1]
        if back != "rgba(0, 0, 0, 0)":
            brighter, darker = sorted((luminance(ink), luminance(back)), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) >= 4.5, inks
    browser.prefer("light")


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
