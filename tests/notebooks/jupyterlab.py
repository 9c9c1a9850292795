"""JupyterLab in a browser without a window: open a notebook, run cells, read their outputs."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.browser import Browser

START_SECONDS = 90
NOTEBOOK = "[...jupyterapp.shell.widgets('main')][0]"


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """Serve the folder's notebooks; yield the address, with the token. No settings of this user are read."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="jupyter-", ignore_cleanup_errors=True) as home:
        log = Path(home, "log")
        places = {
            name: str(Path(home, name))
            for name in (
                "HOME",
                "JUPYTER_CONFIG_DIR",
                "JUPYTER_DATA_DIR",
                "JUPYTER_RUNTIME_DIR",
                "IPYTHONDIR",
            )
        }
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

    def clear(self) -> None:
        """Remove all outputs, so that those that are read later are new."""
        self.command("notebook:clear-all-cell-outputs")
        self.browser.until(f"{NOTEBOOK}.content.widgets.every(one => !one.model.outputs?.length)")

    def run_all(self, answer: str, seconds: float) -> None:
        """Run all cells, and type the answer wherever a cell asks for one."""
        self.command("notebook:run-all-cells")
        deadline = time.monotonic() + seconds
        while not all(cell.get("execution_count") for cell in self.code_cells()):
            assert time.monotonic() < deadline, "the notebook has not ended"
            if self.browser.js("!!(window.prompt_of_cell = document.querySelector('.jp-Stdin-input'))"):
                self.browser.js("prompt_of_cell.focus()")
                self._type(answer)
                self.browser.until("!prompt_of_cell.isConnected")
            time.sleep(0.1)

    def _type(self, answer: str) -> None:
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
