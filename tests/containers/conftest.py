"""Real containers by docker-compose. `make containers` runs these tests; a plain `pytest` leaves them out."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = f"workbook-test-{os.getpid()}"  # of the project, so that its own network and containers are torn down
IMAGE = f"distributed-training-workbook:{NAME}"

SETTINGS = {"RUN_MODE", "ARGS", "WORLD_SIZE", "MASTER_PORT", "LINK", "LINK_DELAY"}
SETTINGS |= {"JUPYTER_TOKEN", "NOTEBOOK_PORT", "JOIN_TIMEOUT", "OP_TIMEOUT", "OMP_NUM_THREADS", "RESTART"}
SETTINGS |= {"COMPOSE_PROFILES", "COMPOSE_FILE", "NOTEBOOK_USER"}


@dataclasses.dataclass
class Node:
    exit_code: int
    stdout: str
    stderr: str

    def json(self) -> dict:
        return json.loads(self.stdout.splitlines()[-1])


Up = Callable[..., dict[str, Node]]


@pytest.fixture(scope="session")
def up() -> Iterator[Up]:
    """`up(RUN_MODE="comm", ...)` runs `docker-compose up` to its end and tells what became of every node."""
    if shutil.which("docker") is None or docker("info", check=False).returncode:
        pytest.exit("No Docker engine answers; start one and try again.", returncode=1)
    try:
        compose("build", timeout=1200)
        yield run_cluster
    finally:
        everything = {"COMPOSE_PROFILES": "more,notebook"}
        compose(
            "down", "--volumes", "--rmi", "all", "--remove-orphans", timeout=120, env=everything, check=False
        )


def run_cluster(*nodes: str, timeout: float = 120, **env: str) -> dict[str, Node]:
    """Run all nodes, or these ones, to the end."""
    try:
        only = ["--no-deps", *nodes] if nodes else []
        log = compose("up", *only, timeout=timeout, env=env, check=False)
        ids = containers()
        assert ids, log
        return dict(outcome(container) for container in inspected(ids))
    finally:
        remove_containers()


def containers() -> list[str]:
    """Return the ids of the nodes' containers, also of those that have ended."""
    return docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={NAME}").stdout.split()


def inspected(ids: list[str]) -> list[dict]:
    return json.loads(docker("inspect", *ids).stdout)


def remove_containers() -> None:
    """Kill and remove the nodes' containers, and leave the network and the volume for the next ones."""
    if ids := containers():
        docker("rm", "--force", *ids)


def outcome(container: dict) -> tuple[str, Node]:
    assert container["State"]["Status"] == "exited", container["State"]
    logs = docker("logs", container["Id"])
    service = container["Config"]["Labels"]["com.docker.compose.service"]
    return service, Node(container["State"]["ExitCode"], logs.stdout, logs.stderr)


def compose(*args: str, timeout: float, env: dict[str, str] | None = None, check: bool = True) -> str:
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    # Settings of the caller's own shell must not leak into the containers.
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    full = clean | {"TAG": NAME, "COMPOSE_COMPATIBILITY": "1"} | (env or {})  # v2 names containers as v1 does
    done = subprocess.run(
        [*program, "-p", NAME, *args],
        cwd=ROOT,
        env=full,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not check or done.returncode == 0, f"{' '.join([*program, *args])}:\n{done.stdout}"
    return done.stdout


def docker(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *args], capture_output=True, text=True, timeout=120, check=check)
