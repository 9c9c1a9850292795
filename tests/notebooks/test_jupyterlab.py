"""A reader opens notebook 02 in JupyterLab, runs it, stops a deadlock, and goes on."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.browser import Browser
from tests.notebooks.books import ROOT, texts_of
from tests.notebooks.jupyterlab import Lab, jupyterlab

NAME = "02_collectives.ipynb"
DEADLOCK = """%%ranks
message = torch.zeros(1)
dist.recv(message, (rank + 1) % world_size)  # every rank waits for the next one"""


@pytest.fixture
def lab(chromium: Browser, tmp_path: Path) -> Iterator[Lab]:
    shutil.copy(ROOT / "notebooks" / NAME, tmp_path)
    with jupyterlab(tmp_path) as address:
        yield Lab(chromium, address, NAME)


def test_all_cells_of_notebook_02_run_and_a_deadlock_can_be_interrupted(lab):
    lab.clear()
    lab.run_all(answer="6", seconds=120)
    stored = [cell for cell in nbformat.read(ROOT / "notebooks" / NAME, 4).cells if cell.cell_type == "code"]
    shown = [texts_of(cell["outputs"]) for cell in lab.code_cells()]
    for before, now in zip(stored, shown, strict=True):
        asks = "predict(" in before.source or ".compare(" in before.source
        assert asks or now == texts_of(before.outputs), before.source

    lab.finish(lab.start("%ranks 4"), 20)
    deadlock = lab.start(DEADLOCK)
    time.sleep(1)
    assert not lab.code_cells()[deadlock]["execution_count"]
    start = time.monotonic()
    lab.browser.click("[data-command='notebook:interrupt-kernel']")
    [error] = lab.finish(deadlock, 20)["outputs"]
    said = "\n".join(error["traceback"])
    assert time.monotonic() - start < 2
    for rank in range(4):
        assert f"rank {rank} was at <cell " in said
    assert "every rank waits for the next one" in said

    after = lab.finish(lab.start("%%ranks\ndist.all_reduce(message + 1)\nworld_size"), 20)
    assert "ranks 0, 1, 2, 3: 4" in texts_of(after["outputs"])
