"""Every README and notebook is in the site, and whatever it refers to is there too."""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.notebooks.books import BOOKS
from tests.run_modes import ROOT

FOUND = [path for pattern in ("*.md", "*/*.md", "*/*/*.md") for path in ROOT.glob(pattern)]
TEXTS = [path for path in FOUND if "/." not in str(path.relative_to(ROOT.parent))]

REFERRING = ("href", "src", "srcset", "poster", "data")


class Document(HTMLParser):
    """The references of an HTML file as (tag, address), its anchors, and the attributes of its images."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.references: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.images: list[dict[str, str | None]] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        self.references += [(tag, value) for name in REFERRING if (value := given.get(name))]
        if tag == "img":
            self.images.append(given)

    def remote(self) -> list[tuple[str, str]]:
        """Return what a browser would load from elsewhere; links that a reader follows are left out."""
        loads = [(tag, url) for tag, url in self.references if tag != "a" and not url.startswith("data:")]
        return [(tag, url) for tag, url in loads if urlsplit(url).netloc]

    def broken(self) -> list[str]:
        """Return the references to files of the site, and to anchors, that do not exist."""
        return [url for _, url in self.references if not self._leads_somewhere(url)]

    def _leads_somewhere(self, url: str) -> bool:
        parts = urlsplit(url)
        if parts.scheme or parts.netloc:
            return True
        path = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
        if not path.is_file():
            return False
        has_anchors = parts.fragment and "=" not in parts.fragment and path.suffix == ".html"
        return not has_anchors or unquote(parts.fragment) in document(path).anchors


@cache
def document(path: Path) -> Document:
    """Return the file, which is read once."""
    return Document(path)


def all_documents(site: Path):
    return [document(path.resolve()) for path in sorted(site.rglob("*.html"))]


def address(path: Path) -> str:
    return re.sub(r"README$", "index", path.relative_to(ROOT).with_suffix("").as_posix()) + ".html"


def test_every_readme_and_notebook_is_a_page_that_the_first_page_lists(site):
    listed = {url for _, url in document((site / "index.html").resolve()).references}
    for path in [*TEXTS, *BOOKS]:
        name = address(path)
        assert (site / name).is_file() and (name in listed or name == "index.html"), path


def test_links_and_anchors_lead_somewhere(site):
    broken = {str(each.path.relative_to(site.resolve())): each.broken() for each in all_documents(site)}
    assert len(broken) > 30 and not {path: urls for path, urls in broken.items() if urls}


def test_nothing_is_loaded_from_elsewhere(site):
    assert not {str(each.path): each.remote() for each in all_documents(site) if each.remote()}
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", styles)


def test_every_picture_has_a_text_that_says_what_it_shows(site):
    without = [
        (each.path.name, image["src"])
        for each in all_documents(site)
        for image in each.images
        if not image.get("alt")
    ]
    assert not without


def test_a_link_to_a_source_file_shows_the_file_and_one_to_a_folder_lists_it(site):
    tour = (site / "comm" / "tour.py.html").read_text("utf-8")
    assert (
        "Show each collective: what it does" in tour and 'href="index.html">Lesson 1: communication' in tour
    )
    listing = document((site / "comm" / "algorithms" / "index.html").resolve())
    assert {("a", "ring.py.html"), ("a", "tree.py.html")} <= set(listing.references)


def build_of(folder: Path, **files: str) -> "subprocess.CompletedProcess[str]":
    """Build a site of the files, by their names without .md, with the configuration of ours."""
    for name, text in files.items():
        (folder / f"{name}.md").write_text(text)
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", ROOT / "site", folder, folder / "html"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_each_link_that_leads_nowhere_fails_the_build_with_its_name(tmp_path):
    wrong = ("a.md", "README.md#b", "c.py", "d/", "e.png")
    done = build_of(tmp_path, README="# Title\n\n" + "".join(f"![f]({to})\n[f]({to})\n" for to in wrong))
    assert done.returncode != 0
    assert not [to for to in wrong if not re.search(rf"WARNING.*{to.partition('#')[2] or to}", done.stderr)]


def test_formulas_need_no_script(tmp_path):
    done = build_of(
        tmp_path, README="# Title\n\nA ring takes $2(n-1)(\\alpha + \\frac{B}{n}\\beta)$:\n\n$$x_1 \\le y$$\n"
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "html" / "index.html").read_text("utf-8")
    assert "<mfrac>" in text and text.count("<math ") == 2 and "MathJax" not in text


def test_notebooks_have_no_links_to_an_unset_account_and_no_notes_about_a_keyboard(site):
    for notebook in (site / "notebooks").glob("[01]*.html"):
        assert not [url for _, url in document(notebook.resolve()).references if "YOUR_ACCOUNT" in url]
        assert "there is no keyboard" not in notebook.read_text("utf-8")


def test_a_picture_leads_to_its_file(site):
    for page in [*site.glob("*/index.html"), *site.glob("notebooks/*.html")]:
        found = document(page.resolve())
        links = {url for tag, url in found.references if tag == "a"}
        assert {image["src"] for image in found.images if (image["src"] or "").endswith(".png")} <= links
