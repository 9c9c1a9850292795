"""The pages of the built site work in a browser: from files, on a narrow screen, and by keyboard."""

from pathlib import Path

import pytest

from tests.browser import Browser

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


def test_text_and_menus_fit_beside_each_other_at_every_width(browser: Browser, site: Path):
    for width in (WIDTH, 1008, 1012, 1072, 1100, 1312, 1330, 1400, 1600, 2000):
        browser.resize(width, 800)
        browser.open(site / "notebooks" / "02_collectives.html")
        assert browser.js("document.documentElement.scrollWidth") <= width, width
        assert browser.js("document.querySelector('.content').getBoundingClientRect().right") <= width, width


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


@pytest.mark.parametrize("name", ["schedules", "all_reduce", "calculator", "context"])
def test_pages_to_play_with_link_to_the_lessons_that_they_show(browser: Browser, site: Path, name: str):
    browser.open(site / "site" / f"{name}.html")
    links = browser.js("[...document.querySelectorAll('a')].map(each => decodeURIComponent(each.pathname))")
    assert len(links) > 2
    assert not [link for link in links if not Path(link).is_file()]


@pytest.mark.parametrize("width", [WIDTH, 1280, 1600])
def test_commands_and_the_comments_beside_them_are_seen_without_scrolling(
    browser: Browser, site: Path, width: int
):
    browser.resize(width, 800, mobile=width == WIDTH)
    for page in ("index.html", "comm/index.html", "exercises/index.html"):
        browser.open(site / page)
        blocks = "[...document.querySelectorAll('.highlight-bash pre')]"
        assert browser.js(f"{blocks}.length") > 0
        assert not browser.js(f"{blocks}.some(pre => pre.scrollWidth > pre.clientWidth)"), page


def test_a_heading_is_smaller_than_the_one_above_it(browser: Browser, site: Path):
    browser.open(site / "index.html")
    sizes = browser.js(
        "['h1', 'h2', 'h3', 'p'].map(name => parseFloat("
        "getComputedStyle(document.querySelector(`article ${name}`)).fontSize))"
    )
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_source_file_fits_beside_the_menu(browser: Browser, site: Path):
    browser.open(site / "comm" / "cost.py.html")
    widths = (
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('article pre'))"
    )
    needed, given = browser.js(widths)
    assert needed <= given
