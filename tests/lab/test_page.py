"""A page is put together of its own files and of what all pages share."""

from pathlib import Path

import pytest

from lab.page import PLAYER, Page


@pytest.fixture
def page(tmp_path: Path) -> Page:
    content, script = tmp_path / "content.html", tmp_path / "own.js"
    content.write_text("<h1>A title</h1>{{player}}<p>{{words}} {{lesson comm/cost.py}}</p>")
    script.write_text('const source = "{{lesson comm/tour.py}}";')
    return Page(content, scripts=[PLAYER, script])


def test_a_page_has_its_title_its_texts_and_the_player(page: Page, tmp_path: Path):
    text = page.write(tmp_path / "page.html", words="{{player}}").read_text("utf-8")
    assert "<title>A title</title>" in text and text.count('id="play"') == 1
    assert "<p>{{player}} comm/cost.py</p>" in text, "what is inserted is not read as a template"


def test_lessons_are_links_in_the_site_and_names_elsewhere(page: Page, tmp_path: Path):
    assert page.lessons() == {"comm/cost.py", "comm/tour.py"}
    alone = page.write(tmp_path / "page.html", words="").read_text("utf-8")
    assert 'source = "comm/tour.py"' in alone and "<a" not in alone
    in_site = page.write(tmp_path / "page.html", words="", root="..").read_text("utf-8")
    assert "<nav><a href='../index.html'>The Distributed Training Workbook</a></nav>" in in_site
    for name in page.lessons():
        assert f"<a href='../{name}.html'>{name}</a>" in in_site


def test_a_page_without_a_title_is_refused_in_a_sentence(page: Page, tmp_path: Path):
    page.content.write_text("<p></p>")
    with pytest.raises(ValueError, match="needs an <h1>"):
        page.write(tmp_path / "page.html")
