"""Train in containers, and let the engine start them again after a death: the third way of elastic.py.

The nodes of docker-compose.yaml run elastic_steps.py in place of their lesson, with `restart: on-failure`.
A rank that dies takes its container with it, as `docker kill` does, and the engine starts all of them again.
"""

import os
import shutil
import subprocess
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
        _compose(*files, "up", "--no-deps", *nodes, timeout=200)
        found = _compose(*files, "ps", "--all", "--quiet", "node0", timeout=60).split()
        subprocess.run(["docker", "cp", f"{found[0]}:{SHARED}/events", str(folder)], check=True, timeout=60)
    finally:
        _compose(*files, "down", "--volumes", "--timeout", "1", timeout=120)


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
