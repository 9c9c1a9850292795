"""Chromium without a window, driven over its DevTools protocol: enough of it to test a page in a file.

    with Browser() as browser:
        browser.open("page.html")
        browser.key(" ")
        browser.js("document.title")

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60  # seconds for anything that the browser is asked to do
START_PATIENCE = 120  # seconds until it runs; other tests share the cores
SAID = "stderr.txt"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-breakpad", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--window-size=1280,800", "about:blank"),
)


def find_chromium() -> str | None:
    """The path of the first Chromium there is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def processes_of(folder: Path) -> list[str]:
    """Return the ids of the processes whose command names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found += [path.parent.name] if str(folder).encode() in path.read_bytes() else []
    return found


class Browser:
    """One page. What it asked the network for is in `requests`, what went wrong in `errors`."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        self._calls = 0
        self.folder = Path(tempfile.mkdtemp(prefix="chromium-"))
        with (self.folder / SAID).open("wb") as said:
            self._process = subprocess.Popen(
                [find_chromium() or NAMES[0], f"--user-data-dir={self.folder}", *FLAGS],
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # so that all its processes can be ended at once
                env=os.environ | {"HOME": str(self.folder), "TMPDIR": str(self.folder)},
            )
        try:
            self._socket = websocket.create_connection(
                self._page_address(), timeout=PATIENCE, suppress_origin=True, http_no_proxy=["127.0.0.1"]
            )
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise

    def _page_address(self) -> str:
        written, deadline = self.folder / "DevToolsActivePort", time.monotonic() + START_PATIENCE
        while not (written.exists() and written.read_text().count("\n")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Chromium did not start: {self._state()}")
            time.sleep(0.02)
        port = written.read_text().split()[0]
        ask = build_opener(ProxyHandler({}))  # whatever proxy the environment names is not for this
        with ask.open(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
            return next(page for page in json.load(answer) if page["type"] == "page")["webSocketDebuggerUrl"]

    def _state(self) -> str:
        """Return what is known of a browser that does not answer: where its threads wait, what it said."""
        waits = []
        for task in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with suppress(OSError):  # it has just ended
                waits.append(f"{(task / 'comm').read_text().strip()} in {(task / 'wchan').read_text()}")
        said = (self.folder / SAID).read_text(errors="replace")[-2000:]
        status, load = self._process.poll(), os.getloadavg()[0]
        return f"exit status {status}, load {load}, threads: {', '.join(waits)}; it said: {said}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()

    def _end(self) -> None:
        # It has nothing to save. Its helpers die a moment after it, and until then may still write files.
        deadline = time.monotonic() + PATIENCE
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        while self.folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while (message := self._receive()).get("id") != self._calls:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        self._loaded |= method == "Page.loadEventFired"
        return message

    def open(self, path: str | Path, fragment: str = "") -> None:
        """Load the file and wait until it is there; `fragment` is what follows the #."""
        self.call("Page.navigate", url="about:blank")  # or a new fragment alone would not load it again
        self._loaded = False
        self.call("Page.navigate", url=Path(path).resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        while not self._loaded:
            self._receive()
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception']['description']}")
        return answer["result"].get("value")

    def json(self, expression: str) -> Any:
        """The value of a JavaScript expression, in which a number that is none is None."""
        return json.loads(self.js(f"JSON.stringify({expression})"))

    def until(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {seconds:g} s: {expression}")
            time.sleep(0.02)

    def key(self, key: str) -> None:
        """Press and release, named as in KeyboardEvent.key."""
        named = {"text": key} if len(key) == 1 else {}
        code = {" ": 32, "Tab": 9, "End": 35, "Home": 36, "Escape": 27}.get(key)
        code = code or {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def mouse(self, what: str, x: float, y: float) -> None:
        """Moved, Pressed or Released, with the left button, in pixels of the window."""
        pressed = {"button": "left", "clickCount": 1} if what != "Moved" else {}
        self.call("Input.dispatchMouseEvent", type=f"mouse{what}", x=x, y=y, **pressed)

    def click(self, selector: str) -> None:
        """The left button, on the middle of the first element the selector finds."""
        x, y = self.middle(selector)
        for what in ("Moved", "Pressed", "Released"):
            self.mouse(what, x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the element is, scrolled into view, once the page has heard of the scrolling."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")
        box = self.js(f"{found}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """The window's size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Whether the reader likes pages "light" or "dark"."""
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme_feature])

    def screenshot(self, path: str | Path) -> Path:
        """A PNG of the window."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return Path(path)
