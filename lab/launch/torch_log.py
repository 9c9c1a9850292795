"""Silence messages of torch that no reader can act on, such as the C++ frames for a lost connection."""

import ctypes
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch

_ERROR = 2  # INFO 0, WARNING 1


def hide_torch_warnings() -> None:
    """Let torch's C++ code print errors only, unless TORCH_CPP_LOG_LEVEL sets another level.

    torch reads that variable when it is imported. After the import only the flag inside torch has an effect.
    """
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    with suppress(OSError, ValueError):  # another build may lack the file or the flag: then torch prints more
        libraries = Path(torch.__file__).parent / "lib"
        library = ctypes.CDLL(str(next(iter(libraries.glob("libc10.*")), libraries / "libc10.so")))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERROR
