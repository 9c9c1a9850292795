"""Write the pages to play with: each is one HTML file that needs no server and no network.

python site/pages.py --out FOLDER
"""

import argparse
from pathlib import Path

from lab.gantt import COLORS
from lab.page import PLAYER, assemble
from pipeline_parallel.page import write_page

SITE = Path(__file__).resolve().parent

# The template of each page, as READMEs link to it, and the name of the page.
PAGES = {
    "pipeline_parallel/page.html": "schedules.html",
    "site/all_reduce/page.html": "all_reduce.html",
    "site/calculator/page.html": "calculator.html",
}


def write_pages(folder: Path) -> None:
    """Write all pages into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / "schedules.html")
    write_all_reduce(folder / "all_reduce.html")
    write_calculator(folder / "calculator.html")


def write_all_reduce(path: Path) -> None:
    """Write the page of an all-reduce's messages."""
    here = SITE / "all_reduce"
    colors = {"partial": "communication", "complete": "backward"}
    lines = {
        "flat": ("wait", "6 3"),
        "tree": ("optimizer", "2 3"),
        "ring": ("communication", "none"),
        "recursive_doubling": ("data", "8 3 2 3"),
        "halving_doubling": ("compute", "none"),
    }
    assemble(
        path,
        here / "page.html",
        styles=[here / "page.css"],
        scripts=[PLAYER, here / "algorithms.js", here / "page.js", here / "sizes.js"],
        rules=_variables(colors)
        + "".join(
            f"#sizes .line-{name} {{ stroke: {COLORS[color]}; stroke-dasharray: {dashes}; }}\n"
            for name, (color, dashes) in lines.items()
        ),
    )


def write_calculator(path: Path) -> None:
    """Write the calculator of memory and step time."""
    here = SITE / "calculator"
    colors = {
        "parameters": "compute",
        "gradients": "forward",
        "optimizer-state": "optimizer",
        "activations": "data",
        "computing": "compute",
        "communication": "communication",
    }
    scripts = [here / name for name in ("formulas.js", "page.js", "tables.js")]
    assemble(path, here / "page.html", styles=[here / "page.css"], scripts=scripts, rules=_variables(colors))


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
