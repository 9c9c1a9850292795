"""Every RUN_MODE of entrypoint.sh as tests need it: its script, its `main` and the class of its arguments."""

import ast
import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MODES: list[tuple[str, str, str]] = re.findall(
    r"^(\w+) +(\S+\.py) +(.+)$", (ROOT / "entrypoint.sh").read_text(), re.MULTILINE
)
"""RUN_MODE, script, and what entrypoint.sh says that it teaches."""

SCRIPTS = {mode: script for mode, script, _ in MODES}

FEW_STEPS = {"comm": ["--mb", "0.01", "--repeats", "1"], "point_to_point": []}
"""Options with which a mode's run is short; every other mode takes --steps."""


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
