"""Under torchrun --max-restarts a job whose ranks are killed ends with the bits of an undisturbed run."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.comm.places import free_port
from tests.hybrid_parallel.test_run import summaries

OPTIONS: dict[str, Any] = {"steps": 8, "batch_size": 8, "size": "tiny", "layers": 4}
MESHES: dict[str, dict[str, Any]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2, "microbatches": 2}}
LAUNCHERS = {"tensor": "torch.distributed.run", "pipeline": "lab.launch.torchrun"}

# Ranks die at two moments: when there is no checkpoint yet, and after the one of step 3.
SCRIPT = """
import os, signal, time
from pathlib import Path
from comm.script import start
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.train_hybrid import HybridArgs, main
from training.run import Run

attempt, batch = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Run.batch

def dying(self, step):
    if (attempt, self._cluster.rank, step) in ((0, 1, 2), (1, 0, 5)):
        while attempt and not (Path({folder!r}) / "step-3" / "manifest").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(self, step)

Run.batch = dying
start(main, HybridArgs, read=read_arguments)
"""


@pytest.mark.parametrize("axis", MESHES)
def test_killed_ranks_are_started_again_and_end_with_the_bits_of_an_undisturbed_run(tmp_path, axis):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(folder=str(folder)))
    launch = [sys.executable, "-m", LAUNCHERS[axis], "--nproc-per-node=2", "--max-restarts=2"]
    is_ours = LAUNCHERS[axis] == "lab.launch.torchrun"
    if not is_ours:
        launch.append(f"--master-port={free_port()}")
    options = [word for name, value in (OPTIONS | MESHES[axis]).items() for word in ("--" + name, str(value))]
    saving = ["--checkpoint", str(folder), "--checkpoint-every", "3", "--auto-resume", "--json"]
    done = subprocess.run(
        [*launch, str(script), *options, *saving],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    [undisturbed] = summaries(2, [OPTIONS | MESHES[axis]])
    for figure in ("last_loss", "replica_digest"):
        assert report[figure] == undisturbed[figure], figure
    assert re.findall(r"restart .*", done.stderr)[:2] == [
        f"restart 1: training starts at step 0 again: {folder} has no complete checkpoint yet.",
        f"restart 2: training continues after step 3 of 8, from the checkpoint in {folder}.",
    ]
    if is_ours:
        assert "Traceback" not in done.stderr and "rank 1 has died" in done.stderr
