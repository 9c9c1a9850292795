"""The pods of scripts/kubernetes.yaml, as processes of this machine: they train, are evicted and go on."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from hybrid_parallel.config import load, split_config
from lab.launch.errors import Stopped
from tests.comm.places import free_port
from tests.hybrid_parallel.test_run import summaries
from tests.scripts.kubernetes import ROOT, command_of_pod, objects, small_job
from training.checkpoint import complete_steps

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
