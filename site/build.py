"""Build the site of READMEs, notebooks and pages to play with, offline; every warning is an error.

make site
python site/build.py --out FOLDER
"""

import argparse
import shutil
import sys
from pathlib import Path

try:
    from sphinx.cmd.build import build_main
except ModuleNotFoundError:
    raise SystemExit("The site needs Sphinx: run `make setup`, which installs requirements.txt.") from None

SITE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=SITE / "_build", help="the folder to write (its html/ is replaced)"
    )
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out / "html", ignore_errors=True)  # or pages would stay whose sources are gone
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out}: cannot write there ({error.strerror}).") from error
    options = ["--fresh-env", "--fail-on-warning", "--keep-going", "--quiet"]
    folders = ["-c", SITE, "-d", out / "doctrees", SITE.parent, out / "html"]
    failed = build_main([*options, *map(str, folders)])
    if not failed:
        print(f"The site is built: open {out / 'html' / 'index.html'} in any browser.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
