"""Find the notebooks, and compare the outputs of two executions."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [book.stem for book in BOOKS]

_VARIES = (
    (re.compile(r"\d+(\.\d+)? (s|ms|us|ns)\b"), "TIME"),
    (re.compile(r"/[\w./-]+/"), "PATH/"),
    (re.compile(r"\x1b\[\d+m"), ""),
)


def texts_of(outputs: list[Any]) -> str:
    """Return the text of a cell's outputs without times, paths and colours. Lines of ranks come in any order."""
    lines: list[str] = []
    for output in outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        for varies, instead in _VARIES:
            text = varies.sub(instead, text)
        lines += text.splitlines()
    tagged = sorted(line for line in lines if line.startswith("[rank "))
    return "\n".join([*tagged, *(line for line in lines if not line.startswith("[rank "))])
