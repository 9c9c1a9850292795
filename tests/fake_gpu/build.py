"""Build the fake device for this torch, once for each version of torch and of the sources.

It takes a C++ compiler and a minute or two. The result is kept in FAKE_GPU_BUILD, by default a user's cache.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
MODULE = "fake_gpu"
UNITS = ("kernels", "memory", "nccl", "streams")
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-DUSE_C10D", "-DTORCH_API_INCLUDE_EXTENSION_H")
FLAGS += (f"-DTORCH_EXTENSION_NAME={MODULE}",)


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def folder() -> Path:
    """Return where the build for this torch and these sources belongs; torch is not imported (device.py)."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256()
    for part in (version, sys.version, sysconfig.get_platform()):
        digest.update(part.encode())
    digest.update(" ".join(FLAGS).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(
        os.environ.get("FAKE_GPU_BUILD") or Path(cache) / "distributed-training-workbook" / "fake_gpu"
    )
    return root / f"{version}-{digest.hexdigest()[:16]}"


def build() -> Path:
    """Return the folder with the libraries; compile them first if it is not there yet."""
    target = folder()
    if target.is_dir():
        return target
    found = compiler()
    if found is None:
        raise SystemExit(
            "The fake GPU needs a C++ compiler, and there is none: install g++, or name one in CXX."
        )
    print(f"compiling the fake GPU into {target} (once, a minute or two)", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _compile(found, Path(scratch), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # or another process was faster
                raise
    return target


def _compile(found: str, scratch: Path, made: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()[0]
    common = [found, *FLAGS, *(f"-isystem{path}" for path in includes)]
    common += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    link = [found, "-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    units = ("hooks", *UNITS)
    pending, running = list(units), []
    while pending or running:  # two at a time: each takes a gigabyte
        if pending and len(running) < 2:
            unit = pending.pop()
            command = [*common, "-c", str(SOURCE / f"{unit}.cpp"), "-o", str(scratch / f"{unit}.o")]
            running.append((unit, subprocess.Popen(command)))
        else:
            unit, process = running.pop(0)
            if process.wait():
                raise SystemExit(f"{unit}.cpp does not compile.")
    objects = [str(scratch / f"{unit}.o") for unit in UNITS]
    for name, parts, needed in (
        ("hooks", [str(scratch / "hooks.o")], ["-lc10", "-ltorch_cpu"]),
        (MODULE, objects, ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]),
    ):
        subprocess.run([*link, *parts, "-o", str(made / f"{name}.so"), *needed], check=True)
