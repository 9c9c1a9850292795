"""Read HTML files: what each refers to, and the anchors that it has."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
        has_anchors = parts.fragment and path.suffix == ".html"
        return not has_anchors or unquote(parts.fragment) in document(path).anchors


@cache
def document(path: Path) -> Document:
    """Return the file, which is read once."""
    return Document(path)
