"""A reader opens a notebook in JupyterLab, types a prediction, stops a deadlock, and continues."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.notebooks.books import ROOT, texts_of

NAME = "02_collectives.ipynb"
DEADLOCK = """%%ranks
message = torch.zeros(1)
dist.recv(message, (rank + 1) % world_size)  # every rank waits for the next one"""

START_SECONDS = 90
NOTEBOOK = "[...jupyterapp.shell.widgets('main')][0]"


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """Serve the folder's notebooks; yield the address, with the token. No settings of this user are read."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="jupyter-", ignore_cleanup_errors=True) as home:
        log = Path(home, "log")
        folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
        places = {name: str(Path(home, name)) for name in folders}
        options = ["--ip=127.0.0.1", "--port=0", "--no-browser", f"--IdentityProvider.token={token}"]
        options += ["--expose-app-in-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options],
                env=os.environ | places,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield f"{_address(server, log)}/lab/tree/{{}}?token={token}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # it ends its kernels
            server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


class Lab:
    """A notebook that is open in JupyterLab."""

    def __init__(self, browser: Browser, address: str, name: str) -> None:
        self.browser = browser
        browser.call("Emulation.setFocusEmulationEnabled", enabled=True)  # commands act on what has the focus
        browser.call("Page.navigate", url=address.format(name))
        is_open = f"window.jupyterapp && {NOTEBOOK}?.context?.path === {json.dumps(name)}"
        browser.until(is_open, START_SECONDS)
        browser.until(f"{NOTEBOOK}.sessionContext.session?.kernel?.status === 'idle'", START_SECONDS)
        browser.click(".jp-Notebook .jp-Cell")
        browser.until(f"jupyterapp.shell.currentWidget === {NOTEBOOK}")

    def command(self, name: str) -> None:
        """Start a command of JupyterLab, as its menus do, and do not wait for its end."""
        self.browser.js(f"void jupyterapp.commands.execute({json.dumps(name)})")

    def type(self, answer: str) -> None:
        """Type an answer where a cell asks for one."""
        self.browser.until("!!(window.prompt_of_cell = document.querySelector('.jp-Stdin-input'))")
        self.browser.js("prompt_of_cell.focus()")
        self.browser.call("Input.insertText", text=answer)
        for what in ("keyDown", "keyUp"):
            enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.browser.call("Input.dispatchKeyEvent", type=what, **enter)

    def start(self, source: str) -> int:
        """Add a cell at the end and start to run it. Return its number among the code cells."""
        last = f"{NOTEBOOK}.content.widgets.length - 1"
        self.browser.js(f"{NOTEBOOK}.content.activeCellIndex = {last}")
        before = len(self.code_cells())
        self.command("notebook:insert-cell-below")
        self.browser.until(f"{NOTEBOOK}.content.activeCell.model.type === 'code'")
        while len(self.code_cells()) == before:
            time.sleep(0.02)
        self.browser.js(f"{NOTEBOOK}.content.activeCell.model.sharedModel.setSource({json.dumps(source)})")
        self.command("notebook:run-cell")
        return before

    def finish(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait until the cell has ended, and return it."""
        deadline = time.monotonic() + seconds
        while not (cell := self.code_cells()[number]).get("execution_count"):
            assert time.monotonic() < deadline, "the cell has not ended"
            time.sleep(0.02)
        return cell

    def code_cells(self) -> list[dict[str, Any]]:
        cells = self.browser.js(f"{NOTEBOOK}.content.model.sharedModel.toJSON().cells")
        return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def lab(chromium: Browser, tmp_path: Path) -> Iterator[Lab]:
    shutil.copy(ROOT / "notebooks" / NAME, tmp_path)
    with jupyterlab(tmp_path) as address:
        yield Lab(chromium, address, NAME)


def test_a_prediction_is_typed_and_a_deadlock_can_be_interrupted(lab):
    guess = lab.start("from lab.notebook.prediction import predict\npredict('How many?', example=2).value")
    lab.type("6")
    assert texts_of(lab.finish(guess, 60)["outputs"]).endswith("(6.0, 6.0)")
    lab.finish(lab.start("%load_ext lab.notebook\n%ranks 4"), 60)
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
