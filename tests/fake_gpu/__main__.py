"""`make rehearse`: run the tests of this folder on real GPUs if torch finds one, else on fake GPUs."""

import importlib.util
import os
import re
import sys
from pathlib import Path

from tests.fake_gpu.build import build, compiler
from tests.fake_gpu.conftest import REAL


def main(arguments: list[str]) -> int:
    if (found := reason_to_skip()) is not None:
        print(f"rehearsal skipped: {found}")
        return 0
    if has_cuda():
        os.environ[REAL] = "1"
    else:
        build()
        import tests.fake_gpu.device  # noqa: F401  (before torch, here and in the ranks)
        from lab.ranks import forked

        forked.preload("tests.fake_gpu.device", first=True)
    import pytest

    return pytest.main([*(arguments or []), str(Path(__file__).parent)])


def has_cuda() -> bool:
    """Return whether this torch is built for CUDA, without importing it: the fake must come first."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    text = Path(found.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is not None


def reason_to_skip() -> str | None:
    if has_cuda():
        from lab.launch.devices import num_gpus

        return None if num_gpus() else "this torch is built for CUDA, but finds no GPU."
    if sys.platform != "linux":
        return "the fake GPU is built on Linux only."
    if compiler() is None:
        return "there is no C++ compiler here; install g++, or name one in CXX."
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
