"""Set up what all tests share: ranks that start with everything imported, hypothesis, a browser for pages."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from lab.ranks import forked
from tests.browser import NAMES, Browser, find_chromium, processes_of

# Processes that tests start import this checkout, whichever one the environment was made for.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)

# What a target of its own runs, and the folder or file for which pytest must be asked to collect it.
ON_REQUEST = {
    "containers": "containers",
    "end_to_end": "end_to_end",
    "exercises/end_to_end": "exercises/end_to_end",
    "notebooks/test_execution.py": "notebooks",
    "notebooks/test_jupyterlab.py": "notebooks",
    "notebooks/test_kernels.py": "notebooks",
    "site": "site",
    "slurm": "slurm",
}

settings.register_profile(
    "workbook", deadline=None, max_examples=20, derandomize=bool(os.environ.get("CI")), print_blob=True
)
settings.load_profile("workbook")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what a make target of its own runs, unless it was asked for."""
    tests = Path(__file__).parent
    if not collection_path.is_relative_to(tests):
        return None
    asking = ON_REQUEST.get(collection_path.relative_to(tests).as_posix())
    asked_for = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    is_left_out = asking is not None and not any(arg.is_relative_to(tests / asking) for arg in asked_for)
    return True if is_left_out else None


def pytest_sessionstart(session):
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # only the workers run tests
    gc.disable()  # nothing that is imported while pytest collects is garbage
    forked.preload("tests.preloaded")
    forked.warm_up()  # meanwhile pytest collects
    import torch  # only now, beside the forkserver, which imports it too

    torch.set_num_threads(1)  # two for small tensors wait for each other more than they compute


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if find_chromium() is None:
        say = pytest.fail if os.environ.get("CI_CHROMIUM_REQUIRED") == "1" else pytest.skip
        say(f"no Chromium ({', '.join(NAMES)}) on PATH: apt-get install chromium")
    with Browser() as browser:
        yield browser
    deadline = time.monotonic() + 5  # a killed process is gone a moment later
    while (left := processes_of(browser.folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left and not browser.folder.exists(), "the browser leaves no process and no folder"


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The module's one browser, as if new; whatever a test does, the page must not complain."""
    chromium.resize(1280, 800)
    chromium.requests.clear()
    chromium.errors.clear()
    yield chromium
    chromium.js("0")  # brings what was still to be reported
    assert chromium.errors == []
