"""Silence torch's own log, which answers a lost connection with up to a hundred lines of C++ frames."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

_ERROR = 2  # INFO 0, WARNING 1


def hide_torch_warnings() -> None:
    """Let torch's C++ print errors only, unless TORCH_CPP_LOG_LEVEL asks for another level.

    torch reads that variable while it is imported, so a script that has imported it must set the flag itself.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    with suppress(OSError, ValueError):  # another build may have no such file or flag: then it prints more
        libraries = Path(torch.__file__).parent / "lib"
        library = ctypes.CDLL(str(next(iter(libraries.glob("libc10.*")), libraries / "libc10.so")))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERROR
