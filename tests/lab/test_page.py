"""A page is put together of its own files and of what all pages share."""

from pathlib import Path

import pytest

from lab.page import PLAYER, Page


def test_a_page_has_its_title_its_texts_the_player_and_links_to_lessons_in_the_site(tmp_path: Path):
    content, script, out = tmp_path / "content.html", tmp_path / "own.js", tmp_path / "page.html"
    content.write_text("<h1>A title</h1>{{player}}<p>{{words}} {{lesson comm/cost.py}}</p>")
    script.write_text('const source = "{{lesson comm/tour.py}}";')
    page = Page(content, scripts=[PLAYER, script])
    text = page.write(out, words="{{player}}").read_text("utf-8")
    assert "<title>A title</title>" in text and text.count('id="play"') == 1
    assert "<p>{{player}} comm/cost.py</p>" in text, "what is inserted is not read as a template"
    assert 'source = "comm/tour.py"' in text and "<a" not in text
    in_site = page.write(out, words="", root="..").read_text("utf-8")
    assert "<nav><a href='../index.html'>The Distributed Training Workbook</a></nav>" in in_site
    assert page.lessons() == {"comm/cost.py", "comm/tour.py"}
    for name in page.lessons():
        assert f"<a href='../{name}.html'>{name}</a>" in in_site
    content.write_text("<p></p>")
    with pytest.raises(ValueError, match="needs an <h1>"):
        page.write(out)
