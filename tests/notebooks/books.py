"""Find the notebooks and read them, and compare the outputs of two executions."""

import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [book.stem for book in BOOKS]


@cache
def cells_of(book: Path) -> list[Any]:
    import nbformat  # takes seconds, and all processes of the tests import this module

    return nbformat.read(book, 4).cells


def text_of(book: Path) -> str:
    """Return what the cells say, without their outputs."""
    return "\n\n".join(cell.source for cell in cells_of(book))


_NUMBER = r"\d[\d,]*(\.\d*)?(e[+-]\d+)?"
# Of a prediction, in the words of lab.notebook.prediction.
_VERDICT = "right|wrong"
_VARIES = (
    (re.compile(r"\x1b\[\d+m"), ""),
    (
        re.compile(
            _NUMBER + r" (s|ms|us|ns|years|[kMG]bit/s|[kMGT]B/s|[MGT]FLOP/s|tokens/s|% of the peak)(?=\W|$)"
        ),
        "TIME",
    ),
    (re.compile(_NUMBER + r" nats"), "LOSS"),  # after hundreds of steps a processor's rounding shows
    (re.compile(_NUMBER + r" times as (long|fast)\b"), "TIMES"),
    (re.compile(rf"(TIMES?|LOSS) +({_VERDICT})"), r"\1"),
    (re.compile(r"/[\w./-]+/"), "PATH/"),
    (re.compile(r"process \d+ on [\w.-]+"), "PROCESS"),
    (re.compile(r"(MASTER_PORT=|127\.0\.0\.1:)\d+"), r"\1PORT"),
    (re.compile(r" +"), " "),  # a column is as wide as its times
)


def texts_of(outputs: list[Any]) -> str:
    """Return the text of a cell's outputs without times, paths and colours, and sort the lines of ranks."""
    text = ""
    for output in outputs:
        if "text" in output:  # a piece of a stream, which may end in the middle of a line
            text += output["text"]
        else:
            text += (
                ("" if text.endswith("\n") else "\n") + output.get("data", {}).get("text/plain", "") + "\n"
            )
    for varies, instead in _VARIES:
        text = varies.sub(instead, text)
    lines = text.strip("\n").splitlines()
    tagged = sorted(line for line in lines if line.startswith("[rank "))
    return "\n".join([*tagged, *(line for line in lines if not line.startswith("[rank "))])
