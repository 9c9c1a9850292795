"""Write the pages to play with: each is one HTML file that needs no server and no network.

python site/pages.py --out FOLDER
"""

import argparse
from pathlib import Path

from pipeline_parallel.page import write_page

# The template of each page, as READMEs link to it, and the name of the page.
PAGES = {"pipeline_parallel/page.html": "schedules.html"}


def write_pages(folder: Path) -> None:
    """Write all pages into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / "schedules.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    folder = parser.parse_args().out
    write_pages(folder)
    for name in PAGES.values():
        print(folder / name)


if __name__ == "__main__":
    main()
