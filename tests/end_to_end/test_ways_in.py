"""The commands that start ranks: by hand, with an agent per machine, by a script, and to compare modes."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.comm.places import VARIABLES, free_port
from tests.run_modes import ROOT, python, start_python

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
        words = [*PROGRAMS[program], *arguments.replace("29500", port).split(), *SHORT]
        started.append(start_python(*words, env=clean | {"OMP_NUM_THREADS": "1"} | variables))
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


SCRIPT = ROOT / "scripts" / "launch_training.sh"


def test_two_machines_meet_and_each_starts_its_ranks(tmp_path):
    """What the script starts prints its environment."""
    copy = tmp_path / "scripts" / SCRIPT.name
    copy.parent.mkdir()
    shutil.copy(SCRIPT, copy)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    train = tmp_path / "hybrid_parallel" / "train_hybrid.py"
    train.parent.mkdir()
    train.write_text(
        "import os, sys\n"
        "said = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK')]\n"
        "os.write(1, ' '.join([*said, *sys.argv[3:]]).encode() + b'\\n')  # at once: ranks share the pipe\n"
    )
    (tmp_path / "c.yaml").write_text("num_gpus: 4\n")
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name not in ("TORCHRUN", "OMP_NUM_THREADS")}
    command = ["bash", str(copy), "--config", "c.yaml", "--nnodes=2", "--master-addr=127.0.0.1"]
    machines = [
        subprocess.Popen(
            [*command, f"--master-port={port}", f"--node-rank={rank}", "--steps", "9"],
            env=env,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (1, 0)
    ]
    second, first = (machine.communicate(timeout=240) for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], (first, second)
    assert sorted(first[0].splitlines()) == ["0 4 0 0 --steps 9", "1 4 0 1 --steps 9"], first
    assert sorted(second[0].splitlines()) == ["2 4 1 0 --steps 9", "3 4 1 1 --steps 9"], second
    assert first[1] == second[1] == ""


def test_two_modes_are_compared_in_a_table_a_sentence_and_a_picture(tmp_path):
    settings = {"MODES": "data_parallel_naive data_parallel_bucket_overlap", "WORLD_SIZE": "2"}
    settings |= {"ARGS": "--size tiny --steps 4 --link 1gbit", "PYTHONPATH": str(ROOT)}
    done = python("-m", "training.compare", cwd=tmp_path, timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    assert (
        " of one of data_parallel_" in done.stdout and "communication that no computing hides" in done.stdout
    )
    [picture] = (tmp_path / "traces").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")
