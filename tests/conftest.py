"""Set up what all tests share: ranks that start with everything imported, and hypothesis at a modest pace."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from lab import forked
from tests.passed import PASSED

# Processes that tests start import this checkout, whichever one the environment was made for.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)

settings.register_profile(
    "workbook", deadline=None, max_examples=20, derandomize=bool(os.environ.get("CI")), print_blob=True
)
settings.load_profile("workbook")


def pytest_sessionstart(session):
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # only the workers run tests
    forked.preload("tests.preloaded")
    forked.warm_up()  # meanwhile pytest collects
    forked.keep_spares(4)
    import torch  # only now, beside the forkserver, which imports it too

    torch.set_num_threads(1)  # two for small tensors wait for each other more than they compute


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.passed and not hasattr(item, "callspec"):
        PASSED.add(item.function)
    return report
