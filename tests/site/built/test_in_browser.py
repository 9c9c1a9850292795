"""The pages of the built site work in a browser: from files, on a narrow screen, and by keyboard."""

import sys
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.run_modes import ROOT

sys.path.insert(0, str(ROOT / "site"))
from front import lessons_of
from lesson_pages import PLAYED
from pages import PAGES

IN_THE_MAP = lessons_of((ROOT / "README.md").read_text("utf-8"))

WIDTH = 400


def pages(site: Path) -> list[Path]:
    """Return all pages, but of those that show source files only every tenth: they have one template."""
    found = sorted(site.rglob("*.html"))
    sources = [page for page in found if "." in page.stem]
    return [page for page in found if page not in sources or sources.index(page) % 10 == 0]


def test_pages_load_from_files_without_complaint_and_fit_on_a_narrow_screen(browser: Browser, site: Path):
    browser.resize(WIDTH, 800, mobile=True)
    for page in pages(site):
        browser.open(page)
        assert browser.errors == [], page
        assert browser.js("document.documentElement.scrollWidth") <= WIDTH, page
        browser.js("scrollTo(500, 0)")
        assert browser.js("scrollX") == 0, page
    assert not [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))]


@pytest.mark.parametrize("width", [WIDTH, 1280])
def test_the_keyboard_reaches_the_menu_and_opens_a_page(browser: Browser, site: Path, width: int):
    browser.resize(width, 800, mobile=width == WIDTH)
    browser.open(site / "index.html")
    for _ in range(100):
        browser.key("Tab")
        if browser.js("document.activeElement.textContent") == "Lesson 1: communication":
            break
    browser.until("document.activeElement.getBoundingClientRect().left >= 0")
    assert browser.js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    browser.key("Enter")
    browser.until("document.title.startsWith('Lesson 1')")


def test_the_search_finds_pages_without_a_network(browser: Browser, site: Path):
    browser.open(site / "search.html")
    browser.js("location.search = '?q=bucket'")
    browser.until("document.querySelectorAll('ul.search li a').length > 1")


def test_the_schedule_player_lives_in_the_site(browser: Browser, site: Path):
    browser.open(site / "site" / "index.html")
    browser.js(
        "[...document.querySelectorAll('article a')]"
        ".find(link => link.textContent === 'Pipeline schedules').click()"
    )
    browser.until("document.getElementById('play') !== null")
    browser.click("#play")
    browser.until("document.getElementById('play').textContent === 'Pause'")


@pytest.mark.parametrize("name", ["schedules", "all_reduce", "calculator", "context", "puzzles"])
def test_pages_to_play_with_link_to_the_lessons_that_they_show(browser: Browser, site: Path, name: str):
    browser.open(site / "site" / f"{name}.html")
    links = browser.js("[...document.querySelectorAll('a')].map(each => decodeURIComponent(each.pathname))")
    assert len(links) >= 2
    assert not [link for link in links if not Path(link).is_file()]


def test_the_first_page_plays_and_leads_to_the_first_step_on_any_width(browser: Browser, site: Path):
    for width in (WIDTH, 1280):
        browser.resize(width, 800, mobile=width == WIDTH)
        browser.open(site / "index.html")
        first = "[...document.querySelectorAll('article a')].find(a => a.textContent.startsWith('Start: '))"
        box = browser.js(f"{first}.getBoundingClientRect().toJSON()")
        assert box["left"] >= 0 and box["right"] <= width and box["bottom"] <= 800
        browser.until("document.querySelector('iframe.play').style.height !== ''")
    titles = browser.js(
        "[...document.querySelectorAll('#the-map > ul > li > p:first-child')].map(p => p.textContent)"
    )
    numbers = [title[0] for title in titles if title[0].isdigit()]
    assert numbers == sorted(numbers) and numbers[0] == "1" and len(numbers) > 7
    linked = browser.js("[...document.querySelectorAll('#pages-to-play-with > ul a')].map(a => a.pathname)")
    assert sorted(Path(path).name for path in linked) == sorted(PAGES.values())


@pytest.mark.parametrize("lesson", [lesson for lesson in IN_THE_MAP if lesson in PLAYED])
def test_a_lesson_has_its_page_to_play_with(browser: Browser, site: Path, lesson: str):
    browser.open(site / lesson / "index.html")
    # The page is loaded when it is in sight, and pictures above that are loaded later push it out of sight.
    in_sight = "document.querySelector('iframe.play').scrollIntoView({behavior: 'instant'})"
    browser.until(f"{in_sight}, parseInt(document.querySelector('iframe.play').style.height) > 200")
    assert browser.errors == []


def test_a_lesson_shows_what_its_steps_change(browser: Browser, site: Path):
    browser.open(site / "data_parallel" / "index.html")
    steps = "[...document.querySelectorAll('details.step')]"
    assert browser.js(f"{steps}.map(each => each.open)") == [False, False]
    assert "register_post_accumulate_grad_hook" in browser.js(f"{steps}[0].querySelector('pre').textContent")
    assert "make diff FROM=naive TO=overlap" in browser.js(f"{steps}[0].textContent")


def test_what_answers_a_prediction_is_folded(browser: Browser, site: Path):
    for notebook in sorted((site / "notebooks").glob("[01]*.html")):
        browser.open(notebook)
        cells = (
            "[...document.querySelectorAll('.cell_input')].filter(a => a.textContent.includes('.compare('))"
        )
        verdicts = browser.js(f"{cells}.map(a => a.parentElement.querySelector('details.answer')?.open)")
        assert verdicts and set(verdicts) == {False}, notebook
