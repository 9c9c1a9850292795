"""Import what the forkserver of the tests imports before it forks: all that a test may send to its ranks.

A rank looks up what is pickled by its name, and so imports the module that has it. Where no bytecode is
kept (PYTHONDONTWRITEBYTECODE) every rank of every test would compile the same files again.
"""

import contextlib
import ctypes
import gc
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
HUGE_PAGE = 1 << 21  # bytes
MADV_COLLAPSE = 25  # Linux 6.1
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?\n")


def collapse_memory() -> None:
    """Move anonymous memory to huge pages, if the kernel can.

    A fork then copies one page-table entry for 2 MiB instead of 512. A process with torch has about 300 MiB
    of such memory, and afterwards a fork and the end of its child take 3.4 ms instead of 15.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines(keepends=True) if maps.exists() else ():
        if match := ANONYMOUS.match(line):
            start, end = (int(address, 16) for address in match.groups())
            for at in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


gc.disable()  # it would search all that is imported again and again, and none of it is garbage

# What is imported by libraries only once it is needed: for traces, by name look-ups, tables and checkpoints.
for name in (
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "matplotlib.font_manager"),
    *("encodings.idna", "rich._emoji_codes", "torch.utils.serialization.config"),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# An optimizer's first step imports too.
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()

# Ranks need nothing of these folders. The fake GPUs only where there are some: they change torch.
left_out = {"containers", "notebooks", "site"}
if "tests.fake_gpu.device" not in sys.modules:
    left_out.add("fake_gpu")
for folder in (
    *ROOT.glob("*_parallel"),
    *(ROOT / name for name in ("comm", "training", "zero", "lab", "exercises", "tests")),
):
    for path in sorted(folder.rglob("*.py")):
        if path.stem not in ("__init__", "__main__", "conftest", "preloaded") and not left_out & {
            *path.parts
        }:
            # A test that asks for a file that cannot be imported is told why.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))

# A first command line imports too.
with contextlib.suppress(Exception):
    tyro.cli(importlib.import_module("tests.run_modes").start_of("zero1").arguments, args=[])

gc.enable()
collapse_memory()  # the tests fork some thousand ranks
