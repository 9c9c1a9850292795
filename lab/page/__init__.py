"""Put a page to play with together: one HTML file that needs no server and no network.

    page = Page(Path("all_reduce/page.html"), scripts=[PLAYER, Path("all_reduce/page.js")])
    page.write("all_reduce.html")

A page's own HTML file begins with its `<h1>`; page.html, page.css and page.js are the same for all pages. In
double braces stand names of texts to insert: `{{player}}` is the Play button and the scrubber, and
`{{lesson comm/cost.py}}`, also in scripts, a lesson's file, with a link if the page lies in the site.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent
PLAYER = SHARED / "page_player.js"
HOME = "The Distributed Training Workbook"
LESSON = re.compile(r"{{lesson (\S+)}}")


@dataclass(frozen=True)
class Page:
    """A page's own files: the HTML of its content, styles, and scripts that run in this order."""

    content: Path
    styles: Sequence[Path] = ()
    scripts: Sequence[Path] = ()

    def lessons(self) -> set[str]:
        """Return the lessons' files that the page names."""
        return {name for file in (self.content, *self.scripts) for name in LESSON.findall(_read(file))}

    def write(self, path: str | Path, rules: str = "", data: Any = None, root: str | None = None) -> Path:
        """Write the page to `path`. Its scripts read `data`.

        `root` is the address of the site's first folder, as seen from the page; None: no links.
        """
        own = _read(self.content)
        title = re.search("<h1>(.*?)</h1>", own)
        assert title is not None, f"{self.content}: a page needs an <h1>, which is its title, too"
        parts = {
            "title": title[1],
            "home": "" if root is None else f"<nav><a href='{root}/index.html'>{HOME}</a></nav>\n",
            "style": "".join(_read(file) for file in (SHARED / "page.css", *self.styles)) + rules,
            "content": _linked(own.replace("{{player}}", _read(SHARED / "page_player.html")), root),
            "script": _linked("".join(_read(file) for file in (SHARED / "page.js", *self.scripts)), root),
            # A browser ends a script at "</script>", also within a string.
            "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        }
        Path(path).write_text(
            re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], _read(SHARED / "page.html")), "utf-8"
        )
        return Path(path)


def _linked(text: str, root: str | None) -> str:
    """Put links to lessons, or only their names, where the text names them."""

    def named(found: re.Match[str]) -> str:
        name = html.escape(found[1])
        return name if root is None else f"<a href='{root}/{name}.html'>{name}</a>"

    return LESSON.sub(named, text)


def _read(file: Path) -> str:
    return file.read_text("utf-8")
