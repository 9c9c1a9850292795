"""Put a page to play with together: one HTML file that needs no server and no network.

    assemble("all_reduce.html", Path("all_reduce/page.html"), scripts=[Path("all_reduce/page.js")])

The template is an HTML file with the names of its parts in double braces. Before a page's own styles and
scripts come those that all pages share, page.css and page.js beside this file. `PLAYER` is a script for pages
that have a time to play.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent
PLAYER = SHARED / "page_player.js"


def assemble(
    path: str | Path,
    template: Path,
    styles: Sequence[Path] = (),
    scripts: Sequence[Path] = (),
    rules: str = "",
    data: Any = None,
    **texts: str,
) -> Path:
    """Write the page to `path`. `rules` follow the styles, scripts read `data`; `texts` fill other names."""
    # A browser ends a script at "</script>", also within a string.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = texts | {
        "style": "".join(_read(file) for file in (SHARED / "page.css", *styles)) + rules,
        "script": "".join(_read(file) for file in (SHARED / "page.js", *scripts)),
        "data": packed,
    }
    page = re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], _read(template))
    Path(path).write_text(page, encoding="utf-8")
    return Path(path)


def _read(file: Path) -> str:
    return file.read_text("utf-8")
