"""Two containers that stand in for the pods of scripts/kubernetes.yaml train, are evicted and go on."""

import contextlib
import re
import time
from collections.abc import Iterator

import pytest

from lab.launch.errors import Stopped
from tests.containers.conftest import IMAGE, NAME, Up, docker
from tests.scripts.kubernetes import command_of_pod, objects, small_job

JOB = objects()["Job"]
POD = JOB["spec"]["template"]["spec"]
INDICES = range(JOB["spec"]["completions"])
VOLUME = NETWORK = f"{NAME}-pods"


@pytest.fixture
def disk(up: Up) -> Iterator[None]:
    """Make the disk and the network of the pods; `up` has built the image."""
    docker("network", "create", "--internal", NETWORK)
    docker("volume", "create", VOLUME)
    yield
    docker("volume", "rm", VOLUME, check=False)
    docker("network", "rm", NETWORK, check=False)


@contextlib.contextmanager
def pods(steps: int) -> Iterator[list[str]]:
    """Start the pods, as a kubelet would, and remove them at the end."""
    names = [f"{NAME}-pod{index}" for index in INDICES]
    try:
        for index, name in reversed(list(zip(INDICES, names, strict=True))):  # the others wait for pod 0
            start(name, index, steps)
        yield names
    finally:
        docker("rm", "--force", *names, check=False)


def start(name: str, index: int, steps: int) -> None:
    (program, *arguments), environment = command_of_pod(small_job(JOB, steps, {}), index)
    user, [container] = POD["securityContext"], POD["containers"]
    host = f"{JOB['metadata']['name']}-{index}"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    options = [
        f"--hostname={host}", f"--network={NETWORK}", f"--network-alias={host}.{POD['subdomain']}",
        f"--user={user['runAsUser']}:{user['runAsGroup']}", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", f"--volume={VOLUME}:/workbook/checkpoints", "--shm-size=1g",
        *(f"--env={variable}={value}" for variable, value in environment.items()),
    ]  # fmt: skip
    docker("run", "--detach", f"--name={name}", *options, f"--entrypoint={program}", IMAGE, *arguments)


def logs(name: str) -> str:
    log = docker("logs", name)
    return log.stdout + log.stderr


def exit_codes(names: list[str]) -> list[int]:
    return [int(docker("wait", name).stdout) for name in names]


def test_after_an_eviction_new_pods_go_on_from_the_checkpoint(disk):
    with pods(1_000_000) as names:
        deadline = time.monotonic() + 90
        while "step 1/" not in logs(names[0]):
            assert time.monotonic() < deadline, logs(names[0]) + logs(names[1])
            time.sleep(0.2)
        docker("stop", "--time=50", names[1])
        codes = exit_codes(names)
        assert set(codes) <= {Stopped.BY_USER, 128 + 15}, logs(names[0])
        [saved] = set(re.findall(r"stopped after step (\d+) of", logs(names[0])))
    with pods(int(saved) + 5) as names:
        assert exit_codes(names) == [0, 0], logs(names[0])
        assert f"step {int(saved) + 5}/" in logs(names[0]) and "bitwise equal" in logs(names[0])
