"""Write the pages to play with: each is one HTML file that needs no server and no network.

python site/pages.py --out FOLDER
"""

import argparse
from pathlib import Path

from lab.page import PLAYER, Page
from lab.trace.gantt import COLORS, OTHER_COLORS, readable_on
from pipeline_parallel.analysis import page as schedules
from puzzles.puzzles import PUZZLES

SITE = Path(__file__).resolve().parent

# The template of each page, as READMEs link to it, and the name of the page.
PAGES = {
    "pipeline_parallel/analysis/page.html": "schedules.html",
    "site/all_reduce/page.html": "all_reduce.html",
    "site/calculator/page.html": "calculator.html",
    "site/context/page.html": "context.html",
    "site/puzzles/page.html": "puzzles.html",
}

# The colours of up to 8 ranks: neighbours differ most.
_NAMES = ("compute", "data", "backward", "optimizer", "forward", "communication", "weight")
RANKS = [*(COLORS[name] for name in _NAMES), OTHER_COLORS[4]]


def _page(folder: str, *scripts: str, shared: tuple[Path, ...] = ()) -> Page:
    here = SITE / folder
    return Page(here / "page.html", [here / "page.css"], [*shared, *(here / name for name in scripts)])


ALL_REDUCE = _page("all_reduce", "algorithms.js", "messages.js", "page.js", "sizes.js", shared=(PLAYER,))
CALCULATOR = _page("calculator", "formulas.js", "page.js", "tables.js", "splits.js", "sending_less.js")
CONTEXT = _page(
    "context",
    *("cut.js", "times.js", "traffic.js", "page.js", "timeline.js", "moment.js", "tables.js"),
    shared=(PLAYER,),
)
PUZZLE_PAGE = _page("puzzles", "rules.js", "page.js", "chart.js")


def lessons() -> set[str]:
    """Return the lessons' files to which the pages link."""
    pages = (schedules.PAGE, ALL_REDUCE, CALCULATOR, CONTEXT, PUZZLE_PAGE)
    return set().union(*(page.lessons() for page in pages))


def write_pages(folder: Path, root: str | None = None) -> None:
    """Write all pages into the folder; `root` is where they find the site's pages of lessons."""
    folder.mkdir(parents=True, exist_ok=True)
    schedules.write_page(folder / "schedules.html", root=root)
    write_all_reduce(folder / "all_reduce.html", root)
    write_calculator(folder / "calculator.html", root)
    write_context(folder / "context.html", root)
    write_puzzles(folder / "puzzles.html", root)


def write_all_reduce(path: Path, root: str | None) -> None:
    """Write the page of an all-reduce's messages."""
    lines = {
        "flat": ("wait", "6 3"),
        "tree": ("optimizer", "2 3"),
        "ring": ("communication", "none"),
        "recursive_doubling": ("data", "8 3 2 3"),
        "halving_doubling": ("compute", "none"),
    }
    strokes = "".join(
        f"#sizes .line-{name} {{ stroke: {COLORS[color]}; stroke-dasharray: {dashes}; }}\n"
        for name, (color, dashes) in lines.items()
    )
    colors = _variables({"partial": "communication", "complete": "backward"})
    ALL_REDUCE.write(path, rules=colors + strokes, root=root)


def write_calculator(path: Path, root: str | None) -> None:
    """Write the calculator of memory and step time."""
    colors = {
        "parameters": "compute",
        "gradients": "forward",
        "optimizer-state": "optimizer",
        "activations": "data",
        "computing": "compute",
        "waiting": "optimizer",
        "communication": "communication",
    }
    CALCULATOR.write(path, rules=_variables(colors), root=root)


def write_context(path: Path, root: str | None) -> None:
    """Write the page of ring attention."""
    rules = (
        f".rank{rank} {{ --fill: {color}; --ink-on: {readable_on(color)}; }}\n"
        for rank, color in enumerate(RANKS)
    )
    CONTEXT.write(path, rules="".join(rules), root=root)


def write_puzzles(path: Path, root: str | None) -> None:
    """Write the page of puzzles."""
    colors = {
        "forward": "forward",
        "backward": "backward",
        "update": "optimizer",
        "load": "data",
        "send": "communication",
        "gather": "compute",
        "reduce": "weight",
    }
    rules = (
        f".{kind} {{ --fill: {COLORS[name]}; --ink-on: {readable_on(COLORS[name])}; }}\n"
        for kind, name in colors.items()
    )
    PUZZLE_PAGE.write(path, rules="".join(rules), data=PUZZLES, root=root)


def _variables(colors: dict[str, str]) -> str:
    """Return style variables that have the colours of the charts."""
    return f":root {{ {' '.join(f'--{name}: {COLORS[color]};' for name, color in colors.items())} }}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    folder = parser.parse_args().out
    try:
        write_pages(folder)
    except OSError as error:
        raise SystemExit(f"--out {folder}: cannot write there ({error.strerror}).") from error
    for name in PAGES.values():
        print(folder / name)


if __name__ == "__main__":
    main()
