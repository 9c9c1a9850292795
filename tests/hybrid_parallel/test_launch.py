"""scripts/launch_training.sh: what it starts, and what it refuses. No test here starts ranks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.run_modes import ROOT

SCRIPT = ROOT / "scripts" / "launch_training.sh"


@pytest.fixture
def launch(tmp_path):
    """Run the script in an empty folder, with a torchrun that prints its arguments, one a line, and exits 7.

    The python that reads the configuration is a stub, too, unless `python` is given: it asks for 8 processes.
    """
    torchrun = tmp_path / "fake torchrun"
    torchrun.mkdir()
    (torchrun / "torchrun").write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\nexit 7\n'
    )
    (torchrun / "python3").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >&2\necho 8\n')
    for file in torchrun.iterdir():
        file.chmod(0o755)
    copy = tmp_path / "a copy" / "scripts" / SCRIPT.name  # beside it there is no .venv
    copy.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{torchrun}:{os.environ['PATH']}", "TORCHRUN": "torchrun"} | env
        command = ["bash", str(copy), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    return run


def root_of(done: subprocess.CompletedProcess[str]) -> Path:
    return Path(done.args[1]).parent.parent


def test_it_starts_torchrun_with_the_number_of_processes_and_ends_with_its_exit_code(launch):
    options = ["--max_restarts=2", "--config", "my config.yaml", "--steps", "5", "--link", "a *"]
    done = launch(*options, OMP_NUM_THREADS="3")
    train = str(root_of(done) / "hybrid_parallel" / "train_hybrid.py")
    words = ["--config", "my config.yaml", "--steps", "5", "--link", "a *"]
    assert done.returncode == 7
    assert done.stdout.splitlines() == ["3", "--max-restarts=2", "--nproc-per-node=8", train, *words]
    assert done.stderr.splitlines() == ["-P", "-m", "hybrid_parallel.config", *words]


def test_each_machine_of_several_starts_its_part_and_meets_at_the_first(launch):
    machines = ["--nnodes", "2", "--node_rank=1", "--master-addr", "node0"]
    for port, words in (("29500", []), ("1234", ["--master-port", "1234"])):
        done = launch(*machines, "--config", "c.yaml", *words, "--tensor", "4")
        assert done.returncode == 7, done.stderr
        assert done.stdout.splitlines()[1:-5] == [
            "--max-restarts=0", "--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--rdzv-backend=static",
            f"--rdzv-endpoint=node0:{port}", "--rdzv-id=hybrid",
        ]  # fmt: skip
        assert done.stdout.splitlines()[-4:] == ["--config", "c.yaml", "--tensor", "4"]


MACHINES = {"--nnodes": "2", "--node-rank": "0", "--master-addr": "node0"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--nnodes": "0"}, "--nnodes is '0'; it must be the number of machines, 1 or more."),
        ({"--nnodes": "3"}, "num_gpus is 8, which 3 machines cannot share equally; choose a multiple of 3."),
        ({"--nnodes": None}, "--node-rank and --master-addr need --nnodes, the number of machines."),
        ({"--node-rank": "2"}, "--node-rank is '2'; it must be from 0 to 1."),
        ({"--node-rank": None}, "--nnodes needs --node-rank, this machine's number from 0 to 1."),
        ({"--master-port": "0"}, "--master-port is '0'; it must be from 1 to 65535."),
        ({"--config": None}, "There is no --config FILE."),
    ],
)
def test_machines_that_make_no_sense_are_refused_before_any_start(launch, changes: dict, said: str):
    options = {"--config": "c.yaml"} | MACHINES | changes
    done = launch(*(f"{name}={value}" for name, value in options.items() if value is not None))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == said


def test_a_mistake_in_the_configuration_is_refused_before_any_start(launch, tmp_path):
    python = tmp_path / "fake torchrun" / "python3"
    python.write_text("#!/usr/bin/env bash\necho 'c.yaml: there is no num_gpus' >&2\nexit 2\n")
    done = launch("--config", "c.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "c.yaml: there is no num_gpus\n")
