"""The commands of docs/running.md that start ranks without make: by hand, and with an agent per machine."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.comm.test_rendezvous import VARIABLES, free_port
from tests.run_modes import ROOT

COMMANDS = re.findall(
    r"^((?:\w+=\S+ )*)\.venv/bin/(python|torchrun) (.*)$",
    (ROOT / "docs" / "running.md").read_text(),
    re.MULTILINE,
)
PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
SHORT = ["--steps", "2", "--size", "tiny", "--batch-size", "8", "--json"]


def together(commands: list[tuple[str, str, str]]) -> dict:
    """Start the commands at once, short and on a free port; return the one report that they print."""
    port, clean = str(free_port()), {k: v for k, v in os.environ.items() if k not in VARIABLES}
    started = []
    for settings, program, arguments in commands:
        variables = dict(setting.split("=") for setting in settings.replace("29500", port).split())
        words = [sys.executable, *PROGRAMS[program], *arguments.replace("29500", port).split(), *SHORT]
        env = clean | {"OMP_NUM_THREADS": "1"} | variables
        started.append(
            subprocess.Popen(
                words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), said
    [report] = [line for out, _ in said for line in out.splitlines() if line.startswith("{")]
    return json.loads(report)


@pytest.mark.parametrize(
    ("what", "commands", "world_size"),
    [
        ("by hand", [one for one in COMMANDS if "RANK=" in one[0] and "train_naive" in one[2]], 2),
        ("two agents", [one for one in COMMANDS if "--nnodes=2" in one[2]], 4),
    ],
    ids=["by hand", "two agents"],
)
def test_the_commands_of_the_page_train(what: str, commands: list[tuple[str, str, str]], world_size: int):
    assert len(commands) == 2, what
    report = together(commands)
    assert (report["world_size"], report["steps"], report["replicas_equal"]) == (world_size, 2, True)
    assert report["bytes_sent"] == report["bytes_formula"] > 0
