"""Run the lessons in MODES one after the other, in the place of entrypoint.sh in each container.

Each line of MODES is a RUN_MODE and its options. The lessons run in forks of a process that has imported
the libraries, or they would spend most of their time on that. Each fork imports the workbook itself. Each
lesson has a port of its own, because the first ranks may begin while the last ones still leave.
"""

import importlib
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

LIBRARIES = (
    *("matplotlib.figure", "rich.progress", "rich.table", "safetensors.torch", "tyro", "yaml"),
    *("torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
)

SCRIPTS = dict(re.findall(r"^(\w+) +(\S+\.py) ", Path("entrypoint.sh").read_text(), re.MULTILINE))


def exit_status(mode: str, options: list[str], port: int) -> int:
    """Run one lesson, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        os.environ |= {"RUN_MODE": mode, "MASTER_PORT": str(port)}
        sys.argv = [SCRIPTS[mode], *options]
        runpy.run_path(SCRIPTS[mode], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


for name in LIBRARIES:
    importlib.import_module(name)
failed = False
for number, line in enumerate(os.environ["MODES"].splitlines(), start=1):
    mode, *options = line.split()
    status = exit_status(mode, options, int(os.environ["MASTER_PORT"]) + number)
    if status:
        print(f"{mode} ended with {status}", file=sys.stderr, flush=True)
    failed |= bool(status)
sys.exit(failed)
