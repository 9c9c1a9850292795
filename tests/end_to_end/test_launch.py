"""scripts/launch_training.sh on two machines, which are both this one. The rendezvous is real."""

import os
import shutil
import subprocess
import sys

from tests.comm.places import free_port
from tests.run_modes import ROOT

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
