"""Under torchrun --max-restarts a job whose ranks are killed ends with the bits of an undisturbed run."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel.config import load, split_config
from lab.launch.errors import Stopped
from tests.comm.places import free_port
from tests.hybrid_parallel.test_run import summaries
from tests.run_modes import ROOT, python
from tests.scripts.kubernetes import command_of_pod, objects, small_job
from training.checkpoint import complete_steps

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
    launch = ["-m", LAUNCHERS[axis], "--nproc-per-node=2", "--max-restarts=2"]
    is_ours = LAUNCHERS[axis] == "lab.launch.torchrun"
    if not is_ours:
        launch.append(f"--master-port={free_port()}")
    options = [word for name, value in (OPTIONS | MESHES[axis]).items() for word in ("--" + name, str(value))]
    saving = ["--checkpoint", str(folder), "--checkpoint-every", "3", "--auto-resume", "--json"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = python(*launch, script, *options, *saving, timeout=150, **own)
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


# Rank 0 waits for the worker when it synchronises: so the run is short, but does not end before it is back.
COMES_BACK = """
import time
from comm.membership.survivors import Survivors
from comm.script import start
from low_communication import train_elastic_diloco

check = Survivors.check

def wait_and_check(survivors, may_join):
    while may_join and len(survivors.names) == 1 and not survivors.coordinator.newcomers():
        time.sleep(0.05)
    check(survivors, may_join)

Survivors.check = wait_and_check
start(train_elastic_diloco.main, train_elastic_diloco.ElasticDiLoCoArgs, in_a_child=True)
"""


def test_a_worker_is_back_a_second_after_its_death_and_all_end_with_the_same_parameters(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(COMES_BACK)
    options = "--size tiny --batch-size 8 --steps 16 --sync-every 4 --kill 1@6 --come-back 1 --json"
    launch = ["-m", "lab.launch.torchrun", "--nproc-per-node=2", script]
    done = python(*launch, *options.split(), timeout=240, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [report] = map(json.loads, done.stdout.splitlines())
    assert (report["run_mode"], report["survivors"], report["joins"]) == ("diloco_elastic", [0, 1], 1)
    assert report["replicas_equal"] is True
    events = re.findall(r"rank 1 was killed|lost rank 1; 1 rank|rank 1 is back; 2 ranks", done.stderr)
    assert events == ["rank 1 was killed", "lost rank 1; 1 rank", "rank 1 is back; 2 ranks"], done.stderr


JOB = objects()["Job"]


def start_pods(folder: Path, steps: int) -> list[subprocess.Popen[str]]:
    """Start the command of each pod as a process, with a model that is small."""
    meeting = {"--master-addr=": "127.0.0.1", "--master-port=": str(free_port())}
    job = small_job(JOB, steps, meeting | {"--checkpoint=": str(folder)})
    pods = []
    for index in range(JOB["spec"]["completions"]):
        (program, *rest), environment = command_of_pod(job, index)
        assert program == "python"
        pods.append(
            subprocess.Popen(
                [sys.executable, *rest, "--json"],
                cwd=ROOT,
                env=os.environ | environment | {"HOME": os.environ.get("HOME", "/tmp")},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return pods


def ended(pods: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
        return [(pod.returncode, output) for pod, output in zip(pods, outputs, strict=True)]
    finally:
        for pod in pods:
            pod.kill()


def report_of(pods: list[subprocess.Popen[str]]) -> dict:
    (code, output), (other, _) = ended(pods)
    assert (code, other) == (0, 0), output
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def without_interruption(steps: int) -> dict:
    """Return the report of the pods' training on ranks that are forked here, without checkpoints."""
    (_, *words), _ = command_of_pod(small_job(JOB, steps, {}), 0)
    path, changes = split_config(words[words.index("hybrid_parallel/train_hybrid.py") + 1 :])
    args = dataclasses.asdict(load(str(ROOT / str(path)), changes).args)
    return summaries(2, [args | {"checkpoint": None, "auto_resume": False}])[0]


def test_when_a_pod_is_evicted_all_save_and_stop_and_their_successors_go_on_with_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    pods = start_pods(folder, 1_000_000)
    assert pods[0].stdout is not None
    assert any("step 1/" in line for line in pods[0].stdout)
    pods[1].send_signal(signal.SIGTERM)
    (code, output), (code_of_evicted, _) = ended(pods)
    assert {code, code_of_evicted} <= {Stopped.BY_USER, 128 + signal.SIGTERM}, output
    [saved] = complete_steps(folder)
    assert re.search(f"stopped after step {saved} of", output)
    resumed = report_of(start_pods(folder, saved + 5))
    assert resumed["steps"] == 5
    undisturbed = without_interruption(saved + 5)
    for figure in ("last_loss", "replica_digest"):
        assert resumed[figure] == undisturbed[figure], figure
