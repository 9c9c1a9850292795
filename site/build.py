"""Build the site of READMEs, notebooks and pages to play with, offline; every warning is an error.

make site
python site/build.py --out FOLDER
"""

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

SITE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=SITE / "_build", help="the folder to write (its html/ is replaced)"
    )
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out / "html", ignore_errors=True)  # or pages would stay whose sources are gone
    options = ["--fresh-env", "--fail-on-warning", "--keep-going", "--quiet"]
    folders = ["-c", SITE, "-d", out / "doctrees", SITE.parent, out / "html"]
    failed = build_main([*options, *map(str, folders)])
    if not failed:
        print(f"The site is built: open {out / 'html' / 'index.html'} in any browser.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
