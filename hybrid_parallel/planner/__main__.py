"""Run the planner: python -m hybrid_parallel.planner --help"""

import sys

import tyro

from hybrid_parallel.planner.table import Args, main
from lab.launch.errors import WorkbookError

try:
    main(tyro.cli(Args))
except WorkbookError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
