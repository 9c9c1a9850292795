"""Train in containers, and let the engine start them again after a death: the third way of elastic.py.

The nodes of docker-compose.yaml run elastic_steps.py in place of their lesson, with `restart: on-failure`.
A rank that dies takes its container with it, as `docker kill` does, and the engine starts all of them again.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "workbook-elastic"
SHARED = "/workbook/checkpoints"  # a volume of all nodes


def engine_answers() -> bool:
    """Return whether there is docker-compose, and an engine for it."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0


@contextmanager
def image() -> Iterator[None]:
    """Build the image of the nodes, and remove it at the end."""
    _compose("build", "node0", timeout=1200)
    try:
        yield
    finally:
        _compose("down", "--volumes", "--rmi", "all", timeout=120)


def train(ranks: int, options: list[str], variables: dict[str, str], folder: Path) -> None:
    """Train on so many nodes until all have ended, and copy their file of events into `folder`."""
    node = {
        "restart": "on-failure",
        "entrypoint": ["python", "benchmarks/elastic_steps.py", *options],
        "environment": variables | {"PYTHONSAFEPATH": "1", "WORLD_SIZE": str(ranks)},
    }
    nodes = [f"node{rank}" for rank in range(ranks)]
    override = folder / "elastic.yaml"
    override.write_text(yaml.safe_dump({"services": dict.fromkeys(nodes, node)}))
    files = ["-f", "docker-compose.yaml", "-f", str(override)]
    try:
        _compose(*files, "up", "--detach", "--no-deps", *nodes, timeout=120)
        containers = _compose(*files, "ps", "--quiet", *nodes, timeout=60).split()
        _wait_until_done(containers)
        _docker("cp", f"{containers[0]}:{SHARED}/events", str(folder))
    finally:
        _compose(*files, "down", "--volumes", "--timeout", "1", timeout=120)


def _wait_until_done(containers: list[str], seconds: float = 200) -> None:
    """Wait until all have ended well; one that has failed is about to be started again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        states = _docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", *containers)
        if set(states.splitlines()) == {"exited 0"}:
            return
        time.sleep(0.5)
    raise TimeoutError(f"the containers have not trained to the end in {seconds:.0f} s: {states}")


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, timeout=60, text=True, capture_output=True).stdout


def _compose(*words: str, timeout: float) -> str:
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    done = subprocess.run(
        [*program, "-p", PROJECT, *words],
        cwd=ROOT,
        env=os.environ | {"TAG": PROJECT},
        timeout=timeout,
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout
