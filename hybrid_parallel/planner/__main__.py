"""Run the planner: python -m hybrid_parallel.planner --help"""

import sys

import tyro

from hybrid_parallel.planner.search import Args, main
from lab.launch.errors import WorkbookError

if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except WorkbookError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
