import re
from pathlib import Path

import pytest

from pipeline_parallel.analysis.page import main, simulation, write_page
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank
from tests.browser import Browser

ALL = "show=" + ",".join(SCHEDULES)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "schedules.html")


def shown(browser: Browser) -> list[str]:
    return browser.js("[...document.querySelectorAll('figure')].map(each => each.dataset.run)")


def time_of(browser: Browser) -> float:
    return float(browser.js("Number(document.getElementById('time').value)"))


def fact(browser: Browser, name: str, what: str) -> str:
    return browser.js(f"document.querySelector('[data-run=\"{name}\"] dd.{what}').textContent")


def scrub(browser: Browser, time: float) -> None:
    browser.js(
        f"document.getElementById('time').value = {time};"
        "document.getElementById('time').dispatchEvent(new Event('input', {bubbles: true}))"
    )


def choose(browser: Browser, name: str, value: object) -> None:
    browser.click(f'[name="{name}"][value="{value}"]')


def agree_with_the_simulator(browser: Browser, ranks: int, microbatches: int, message: float) -> None:
    """All that the page shows, in numbers, is what Python computes."""
    assert shown(browser) == list(SCHEDULES)
    for name in SCHEDULES:
        truth = simulation(name, ranks, microbatches, message)
        stages = stages_per_rank(name)
        assert fact(browser, name, "bubble") == f"{100 * truth.bubble:.1f} %"
        assert float(fact(browser, name, "makespan")) == pytest.approx(truth.makespan, rel=1e-3)
        assert float(fact(browser, name, "peak-held").split()[0]) == max(truth.peak_held) / stages


def test_the_page_is_one_file_that_names_no_other(page):
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|\bfetch\b|XMLHttpRequest|WebSocket|\bimport\b|url\(|@import", text)
    assert "{{" not in text and "default-src 'none'" in text
    assert re.findall(r"""\b(?:src|href)\s*=\s*["']([^"']*)""", text) == ["data:,"]


def test_play_moves_the_time_and_pause_stops_it_and_nothing_asks_the_network(browser, page):
    browser.open(page, "time=1")
    browser.click("#play")
    browser.until("document.getElementById('time').value > 1.5")
    browser.click("#play")
    at = time_of(browser)
    browser.js("new Promise(done => setTimeout(done, 100))")
    assert time_of(browser) == at > 1.5
    assert browser.requests == [page.as_uri()] and browser.errors == []


def test_at_any_time_exactly_those_cells_run_and_so_much_is_held(browser, page):
    browser.open(page, ALL)
    truths = {name: simulation(name, 4, 8, 0.0).rows for name in SCHEDULES}
    for wanted in (0.0, 3.3, 12.25, 17.8, 1000.0):
        scrub(browser, wanted)
        at = time_of(browser)  # it ends with the last schedule
        for name, rows in truths.items():
            chart, stages = f"document.querySelector('[data-run=\"{name}\"]')", stages_per_rank(name)
            running = browser.js(
                f"[...{chart}.querySelectorAll('.running')].map(cell => cell.dataset.action)"
            )
            assert running == [str(a) for row in rows for a, start, end in row if start <= at < end]
            held = browser.js(f"[...{chart}.querySelectorAll('text.held')].map(each => each.textContent)")
            assert [float(count) * stages for count in held] == [
                sum(a.kind == "F" and start <= at for a, start, _ in row)
                - sum(a.kind in "BW" and end <= at for a, _, end in row)
                for row in rows
            ]


def test_every_setting_shows_the_simulators_bubble_makespan_and_peak(browser, page):
    browser.open(page, ALL)
    agree_with_the_simulator(browser, 4, 8, 0.0)
    choose(browser, "message", 0.5)
    agree_with_the_simulator(browser, 4, 8, 0.5)
    choose(browser, "microbatches", 16)
    agree_with_the_simulator(browser, 4, 16, 0.5)
    choose(browser, "ranks", 2)  # and as many microbatches a rank as before
    agree_with_the_simulator(browser, 2, 8, 0.5)


def test_a_page_that_cannot_be_written_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("pipeline_parallel.analysis.page.RANKS", (2,))  # fewer simulations
    with pytest.raises(SystemExit, match="No such file or directory"):
        main(Path("/no/such/folder/page.html"))


def test_a_tap_says_what_a_cell_waits_for(browser, page):
    browser.resize(400, 700, mobile=True)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    browser.open(page, "show=gpipe")
    x, y = browser.middle(".cell[data-action='1F0']")
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.until("!document.getElementById('words').hidden")
    assert "It needs 0F0 from rank 0." in browser.js("document.getElementById('words').textContent")
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    browser.resize(1280, 800)
