"""Under torchrun --max-restarts a job whose ranks are killed has the losses of an undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_parallel import train_hybrid
from hybrid_parallel.arguments import HybridArgs
from hybrid_parallel.hybrid import HybridParallel
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.comm.places import free_port
from training.run import Run

STEPS, EVERY = 8, 3
MESHES = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2, "microbatches": 2}}
LAUNCHERS = {"tensor": "torch.distributed.run", "pipeline": "lab.launch.torchrun"}
# By attempt: which rank dies before which step, first when there is no checkpoint yet.
VICTIMS = {"tensor": [(0, 1), (1, 4)], "pipeline": [(1, 2), (0, 5)]}

SCRIPT = """
import os, signal, time
from pathlib import Path
from comm.script import start
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.train_hybrid import HybridArgs, main
from tests.end_to_end import test_restart

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
deaths = dict(enumerate(test_restart.VICTIMS[{axis!r}]))

def before(rank, step):
    if (rank, step) == deaths.get(attempt):
        while step > test_restart.EVERY and not (Path({folder!r}) / "step-3" / "manifest").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

test_restart.note_losses({log!r}, before)
start(main, HybridArgs, read=read_arguments)
"""


def note_losses(log: str, before=lambda rank, step: None) -> None:
    """Let rank 0 write the number and the exact loss of each step. Each rank calls `before` between steps."""
    mean_loss, batch = HybridParallel.mean_loss, Run.batch
    steps = []

    def noted(self, loss):
        mean = mean_loss(self, loss)
        if self.mesh.rank == 0:
            with open(log, "a") as file:
                file.write(f"{steps[-1]} {mean.item().hex()}\n")
        return mean

    def watched(self, step):
        if self._steps_done:
            before(self._cluster.rank, step)
        steps.append(step)
        return batch(self, step)

    HybridParallel.mean_loss, Run.batch = noted, watched  # type: ignore[method-assign]


def losses(log: Path) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in map(str.split, log.read_text().splitlines())]


@pytest.mark.parametrize("axis", MESHES)
def test_killed_ranks_are_started_again_and_the_losses_are_those_of_an_undisturbed_run(tmp_path, axis):
    def undisturbed(cluster: Cluster) -> None:
        note_losses(str(tmp_path / "undisturbed"))
        train_hybrid.main(cluster, HybridArgs(steps=STEPS, size="tiny", layers=4, **MESHES[axis]))

    run_ranks(undisturbed, 2)
    assert [step for step, _ in losses(tmp_path / "undisturbed")] == list(range(STEPS))
    script, folder, log = tmp_path / "script.py", tmp_path / "run", tmp_path / "killed"
    script.write_text(SCRIPT.format(axis=axis, folder=str(folder), log=str(log)))
    launch = [sys.executable, "-m", LAUNCHERS[axis], "--nproc-per-node=2", "--max-restarts=2"]
    if LAUNCHERS[axis] != "lab.launch.torchrun":
        launch.append(f"--master-port={free_port()}")
    sizes = [word for name, value in MESHES[axis].items() for word in (f"--{name}", str(value))]
    options = ["--size", "tiny", "--layers", "4", "--steps", str(STEPS), *sizes]
    saving = ["--checkpoint", str(folder), "--checkpoint-every", str(EVERY), "--auto-resume"]
    done = subprocess.run(
        [*launch, str(script), *options, *saving],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert set(losses(log)) == set(losses(tmp_path / "undisturbed"))
    assert re.findall(r"restart .*", done.stdout) == [
        f"restart 1: training starts at step 0 again: {folder} has no complete checkpoint yet.",
        f"restart 2: training goes on after step 3 of 8, from the checkpoint in {folder}.",
    ]
    if LAUNCHERS[axis] == "lab.launch.torchrun":
        assert "Traceback" not in done.stderr
        assert "rank 1 has died" in done.stderr
