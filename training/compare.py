"""Run several RUN_MODEs with the same options, and show their figures and timelines beside each other.

    make compare MODES="data_parallel_naive data_parallel_overlap" ARGS='--link 200mbit,1ms'
    make compare MODES="data_parallel_naive data_parallel_overlap" LINK=200mbit CONTAINERS=1

With CONTAINERS=1 each mode runs in containers, whose links are real. Without it LINK and LINK_DELAY stand for
--link. The picture is in traces/, which has the timelines of all modes on one scale.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab import units
from lab.launch.errors import WorkbookError
from lab.trace.gantt import Event, draw_panels
from lab.trace.timeline import read_chrome_trace
from lab.what_changed import SHORT

ROOT = Path(__file__).resolve().parent.parent
PICTURES = Path("traces")
NO_TIMELINE = {"comm", "point_to_point", "train", "diloco_elastic", "hybrid_elastic"}
Figures = dict[str, Any]
Runs = dict[str, tuple[Figures, list[Event]]]


def run_here(mode: str, words: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Run a mode on this machine, with its trace in `folder`."""
    settings = {"RUN_MODE": mode, "ARGS": f"{words} --json --trace {folder}", "LINK": "", "LINK_DELAY": ""}
    settings["TORCHRUN"] = f"{sys.executable} -m lab.launch.torchrun"
    return _call(["bash", "entrypoint.sh"], settings)


def run_in_containers(mode: str, words: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Run a mode in the containers of docker-compose.yaml, and copy the trace of rank 0 to `folder`."""
    compose = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    settings = {"RUN_MODE": mode, "ARGS": f"{words} --json --trace traces", "RESTART": "no"}
    settings["COMPOSE_PROFILES"] = "more" if int(os.environ.get("WORLD_SIZE") or 0) > 4 else ""
    try:
        started = _call([*compose, "up", "--build", "--no-color"], settings)
        node = _call([*compose, "ps", "--all", "--quiet", "node0"], settings).stdout.strip()
        if started.returncode or not node:
            return started
        _call(["docker", "cp", f"{node}:/workbook/traces/.", folder], {})
        done = _call(["docker", "logs", node], {})
        code = _call(["docker", "inspect", "--format", "{{.State.ExitCode}}", node], {}).stdout
        return subprocess.CompletedProcess(node, int(code), done.stdout, done.stderr)
    finally:
        _call([*compose, "down"], settings)


def _call(command: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)


def is_on(name: str) -> bool:
    """Return whether a variable of the environment says yes. Raise WorkbookError if it says neither."""
    text = os.environ.get(name, "").strip().lower()
    if text not in ("", "0", "no", "false", "off", "1", "yes", "true", "on"):
        raise WorkbookError(f"{name} is {text!r}; it must be 1 or 0.")
    return text in ("1", "yes", "true", "on")


def with_link(words: str) -> str:
    """Return the options with the link that LINK and LINK_DELAY describe, which containers alone can have."""
    rate, delay = (os.environ.get(name, "") for name in ("LINK", "LINK_DELAY"))
    if not rate and not delay:
        return words
    if not rate or any(word.partition("=")[0] == "--link" for word in words.split()):
        raise WorkbookError("Without CONTAINERS=1, LINK stands for --link: give one of them, with a rate.")
    return f"{words} --link {rate}{delay and ','}{delay}".strip()


def measure(modes: list[str], words: str, in_containers: bool) -> Runs:
    """Return each mode's figures and events. Raise WorkbookError where a mode ends with an error."""
    runs: Runs = {}
    for number, mode in enumerate(modes, 1):
        print(f"{mode} runs ({number} of {len(modes)}) ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            done = (run_in_containers if in_containers else run_here)(mode, words, folder)
            if done.returncode:
                raise WorkbookError(f"{mode} has ended with an error:\n{done.stderr.strip()}")
            [trace] = Path(folder).glob("*.json")
            runs[mode] = json.loads(done.stdout.splitlines()[-1]), read_chrome_trace(trace)
    return runs


def not_hidden(figures: Figures) -> float:
    """Return the seconds of a step's communication in which the rank does not compute."""
    return float(figures["communication_seconds"] * (1 - figures["hidden_share"]))


ROWS: dict[str, Callable[[Figures], str]] = {
    "step": lambda f: units.show_seconds(f["step_seconds"]),
    "computing": lambda f: units.show_seconds(f["compute_seconds"]),
    "communication": lambda f: units.show_seconds(f["communication_seconds"]),
    "not hidden": lambda f: units.show_seconds(not_hidden(f)),
    "bubble": lambda f: f"{f['bubble']:.0%}",
    "sent in a step": lambda f: units.show_bytes(f["bytes_sent"] / f["steps"]),
    "messages": lambda f: f"{f['messages_sent'] / f['steps']:,.0f}",
    "memory": lambda f: units.show_bytes(f["peak_memory_bytes"]),
    "last loss": lambda f: f"{f['last_loss']:.3f}",
}
"""What the table shows of each run's figures (docs/report.md)."""


def table_of(runs: Runs) -> Table:
    """Return a table with a column for each mode, without rows that no mode can fill."""
    table, short = Table(), {mode: name for name, mode in reversed(SHORT.items())}
    table.add_column("")
    for mode in runs:
        table.add_column(short.get(mode, mode), justify="right")
    for name, show in ROWS.items():
        cells = [_cell(show, figures) for figures, _ in runs.values()]
        if any(cell != "-" for cell in cells):
            table.add_row(name, *cells)
    return table


def _cell(show: Callable[[Figures], str], figures: Figures) -> str:
    try:
        return show(figures)
    except (KeyError, TypeError):  # this run does not have the figure
        return "-"


def conclusion(runs: Runs) -> str:
    """Return what the fastest mode gains over the slowest, and where the time went."""
    by_step = sorted((figures for figures, _ in runs.values()), key=lambda f: f["step_seconds"])
    fast, slow = by_step[0], by_step[-1]
    said = f"A step of {fast['run_mode']} takes {fast['step_seconds'] / slow['step_seconds']:.2f} of one of "
    said += slow["run_mode"]
    if fast.get("bubble") is not None and slow.get("bubble") is not None:
        return f"{said}: ranks are idle for {fast['bubble']:.0%} of it instead of {slow['bubble']:.0%}."
    if not (fast.get("communication_seconds") and slow.get("communication_seconds")):
        return f"{said}."
    computed = [f["compute_seconds"] for f in (fast, slow)]
    computing = (units.show_seconds(seconds) for seconds in computed)
    seen = (units.show_seconds(not_hidden(f)) for f in (fast, slow))
    spent = f"{' instead of '.join(seen)} of communication that no computing hides"
    said += f": {spent}, and {' instead of '.join(computing)} of computing."
    if max(computed) > 1.2 * min(computed):
        said += " If both compute the same, that difference is noise: compare again on a quieter machine."
    return said


def main(modes: list[str], words: str, in_containers: bool) -> None:
    """Compare the modes: print a table and a sentence, and draw a picture."""
    modes = [SHORT.get(mode, mode) for mode in modes]
    if len(set(modes)) < 2 or len(set(modes)) < len(modes):
        raise WorkbookError("MODES: name at least two different RUN_MODEs, with a space between them.")
    if without := [mode for mode in modes if mode in NO_TIMELINE]:
        raise WorkbookError(f"MODES: {without[0]} has no timeline to compare; choose modes that train a GPT.")
    if {"--json", "--trace"} & set(words.split()):
        raise WorkbookError("ARGS: make compare itself adds --json and --trace; leave them out.")
    if in_containers and not (shutil.which("docker") and _call(["docker", "info"], {}).returncode == 0):
        raise WorkbookError("CONTAINERS=1 needs Docker, and `docker info` finds no engine that runs here.")
    words = words if in_containers else with_link(words)
    for mode in modes:
        done = _call(["bash", "entrypoint.sh"], {"RUN_MODE": mode, "TORCHRUN": "true"})  # starts no ranks
        if done.returncode:
            said = done.stderr.strip()
            raise WorkbookError(f"MODES: {said}" if "RUN_MODE" in said else said)
    runs = measure(modes, words, in_containers)
    path = PICTURES / f"compare_{time.strftime('%Y-%m-%d_%H-%M-%S')}.png"
    path.parent.mkdir(exist_ok=True)
    ranks = next(iter(runs.values()))[0]["world_size"]
    draw_panels({mode: events for mode, (_, events) in runs.items()}, path, f"{ranks} ranks {words}".strip())
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(runs))
    print(conclusion(runs))
    print(f"The timelines, on one scale, are in {path}.")


if __name__ == "__main__":
    try:
        main(os.environ.get("MODES", "").split(), os.environ.get("ARGS", ""), is_on("CONTAINERS"))
    except WorkbookError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
