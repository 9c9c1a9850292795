"""`make rehearse`: build the fake GPU where that can be done, and run the tests of this folder on it."""

import sys
from importlib.metadata import version
from pathlib import Path

from tests.fake_gpu.build import build, compiler


def main(arguments: list[str]) -> int:
    if (found := reason_to_skip()) is not None:
        print(f"rehearsal skipped: {found}")
        return 0
    build()
    import tests.fake_gpu.device  # noqa: F401  (before torch, here and in the ranks)
    from lab import forked

    forked.preload("tests.fake_gpu.device", first=True)
    import pytest

    return pytest.main([*(arguments or []), str(Path(__file__).parent)])


def reason_to_skip() -> str | None:
    if sys.platform != "linux":
        return "the fake GPU is built on Linux only."
    if "+cu" in version("torch"):
        return "this torch has CUDA; the fake GPU takes its place in torch's CPU wheel."
    if compiler() is None:
        return "there is no C++ compiler here; install g++, or name one in CXX."
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
