"""Every RUN_MODE of entrypoint.sh as tests need it: its script, its `main` and the class of its arguments."""

import ast
import contextlib
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from unittest import mock

import tyro

from comm.cost import Link
from lab.cluster import Cluster
from training.arguments import NotOffered
from training.run import Run

ROOT = Path(__file__).resolve().parent.parent
TABLE: list[tuple[str, str, str, str]] = re.findall(
    r"^(\w+) +(\S+\.py) +(.+?)(?: \| (.+))?$", (ROOT / "entrypoint.sh").read_text(), re.MULTILINE
)
MODES = [row[:3] for row in TABLE]
"""RUN_MODE, script, and what entrypoint.sh says that it teaches."""

NEXT = {mode: what for mode, _, _, what in TABLE if what}
"""By RUN_MODE the command that comes next, and what it shows."""

SCRIPTS = {mode: script for mode, script, _ in MODES}

FEW_STEPS = {
    "comm": ["--mb", "0.01", "--repeats", "1"],
    "point_to_point": [],
    "diloco_plain": ["--steps", "1", "--sync-every", "1"],
}
"""Options with which a mode's run is short; every other mode takes --steps."""


FIELDS = ["run_mode", "world_size", "steps", "first_loss", "last_loss", "step_seconds", "tokens_per_second"]
FIELDS += ["peak_memory_bytes", "bytes_sent", "messages_sent"]
"""The fields with which the summary of every train script begins, in their order."""


class Start(NamedTuple):
    """What a script gives to `comm.script.start`."""

    main: Callable[..., Any]
    arguments: type


@functools.cache
def start_of(mode: str) -> Start:
    """Import the mode's script and return the two arguments of its `start(main, Args)`."""
    script = SCRIPTS[mode]
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    # if __name__ == "__main__": start(main, Args)
    if_main = ast.parse((ROOT / script).read_text()).body[-1]
    [call] = [node for node in ast.walk(if_main) if isinstance(node, ast.Call)]
    assert ast.unparse(call.func) == "start", script
    return Start(*(getattr(module, ast.unparse(argument)) for argument in call.args))


def few_steps(mode: str) -> list[str]:
    """Return the options of a short run."""
    return FEW_STEPS.get(mode, ["--steps", "1"])


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    """Give a link's alpha and beta, and validate on fewer batches: both take most of a short run."""
    link = Link(1e-4, 1e-9)
    with (
        mock.patch("training.run.measure_all_reduce", lambda *_, **__: link),
        mock.patch("training.run.measure_flops", lambda *_: 1e11),
        mock.patch("pipeline_parallel.script.measure_link", lambda *_, **__: link),
        mock.patch("training.data.VALIDATION_BATCHES", 2),
    ):
        yield


def offers(mode: str, option: str, choice: str | None = None) -> bool:
    """Tell whether the mode's command line has the option, such as "checkpoint", and this choice of it."""
    offered = get_type_hints(start_of(mode).arguments, include_extras=True).get(option, NotOffered)
    return offered != NotOffered and (choice is None or choice in get_args(offered))


def python(
    *words: object, cwd: Path = ROOT, timeout: float = 100, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=timeout
    )


def start_python(
    *words: object, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Python with these words, its output in pipes."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train(cluster: Cluster, mode: str, *options: str) -> dict[str, Any]:
    """Run the mode's `main` with the options of a command line, and return this rank's report."""
    reports: list[dict[str, Any]] = []
    finish = Run.finish

    def noting(*args: Any, **figures: Any) -> dict[str, Any]:
        reports.append(finish(*args, **figures))
        return reports[-1]

    main, arguments = start_of(mode)
    with without_measuring(), mock.patch.object(Run, "finish", noting):
        main(cluster, tyro.cli(arguments, args=[*options, "--json"]))
    return reports[-1]
