"""The service `notebook` is JupyterLab for this machine only, and its kernel can be one of the ranks."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from tests.containers.conftest import NAME, ROOT, compose, docker, remove_containers

CONTAINER = f"{NAME}_notebook_1"
CELLS = (
    "%run ../data_parallel/train_naive.py --steps 5",
    "%load_ext lab.notebook\n%ranks 2",
    "%%ranks\nx = torch.ones(1) * rank\ndist.all_reduce(x)\nx",
)
# RANK is set for the server only.
AS_SERVER = """
environment=$(dirname "$(grep -l 'jupyter-la[b]' /proc/[1-9]*/cmdline | head -n 1)")/environ
export "$(tr '\\0' '\\n' < "$environment" | grep ^RANK=)"
exec python -
"""
# As JupyterLab does it, in a new kernel that has the environment of the server.
EXECUTE = f"""
import nbformat
from nbclient import NotebookClient
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {CELLS!r}])
NotebookClient(book, timeout=100, resources={{"metadata": {{"path": "/workbook/notebooks"}}}}).execute()
print([output for cell in book.cells for output in cell.outputs])
"""


@pytest.fixture(scope="module")
def port(up) -> Iterator[int]:
    """The port of JupyterLab, beside nodes that wait for their rank 3."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"RUN_MODE": "data_parallel_naive", "ARGS": "--json --steps 5", "JUPYTER_TOKEN": "sesame"}
    settings |= {"COMPOSE_PROFILES": "notebook", "NOTEBOOK_PORT": str(port)}
    try:
        compose("up", "--build", "-d", timeout=600, env=settings)
        yield port
    finally:
        remove_containers()


def answer(port: int, token: str = "") -> int:
    """Return the status with which the server answers a request for the list of files."""
    deadline = time.monotonic() + 60
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", f"/api/contents?token={token}")
            return connection.getresponse().status
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        finally:
            connection.close()


def test_the_port_is_open_on_this_machine_only_and_needs_the_token(port):
    bindings = json.loads(docker("inspect", CONTAINER).stdout)[0]["HostConfig"]["PortBindings"]
    assert bindings == {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    assert (answer(port), answer(port, "wrong"), answer(port, "sesame")) == (403, 403, 200)


def test_the_log_has_the_one_address_that_works_on_the_host(port):
    assert answer(port, "sesame") == 200
    log = docker("logs", CONTAINER, check=False)
    addresses = set(re.findall(r"(?:https?|file)://\S+", log.stdout + log.stderr))
    assert {address for address in addresses if "token" in address or "file:" in address} == {
        f"http://127.0.0.1:{port}/lab/tree/notebooks?token=..."
    }


def test_nothing_in_the_notebooks_container_runs_as_root(port):
    users = docker("exec", CONTAINER, "bash", "-c", "stat -c %U /proc/[0-9]*").stdout.split()
    assert users and "root" not in users


def test_a_cell_is_the_last_rank_and_the_kernel_goes_on_with_ranks_of_its_own(port):
    done = subprocess.run(
        ["docker", "exec", "-i", CONTAINER, "bash", "-c", AS_SERVER],
        input=EXECUTE,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 3 of 4: here as process" in done.stdout
    assert "ranks 0, 1: tensor([1.])" in done.stdout
    assert docker("wait", *(f"{NAME}_node{i}_1" for i in range(4))).stdout.split() == ["0"] * 4
    figures = json.loads(docker("logs", f"{NAME}_node0_1").stdout.splitlines()[-1])
    assert (figures["world_size"], figures["steps"], figures["replicas_equal"]) == (4, 5, True)
    said = docker("logs", f"{NAME}_node3_1").stderr
    assert "the notebook is rank 3, with this cell: %run ../data_parallel/train_naive.py" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_notebook_of_any_user_saves_in_the_clone(port, tmp_path):
    for folder in (tmp_path, tmp_path / "notebooks", tmp_path / "exercises"):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 1234, 1234)
    clone = ("--project-directory", str(tmp_path), "-f", str(ROOT / "docker-compose.yaml"))
    save = "touch notebooks/mine exercises/mine checkpoints/mine"
    done = compose(
        *clone, "run", "--rm", "--no-deps", "-T", "notebook", save, timeout=60, env={"NOTEBOOK_USER": "1234"}
    )
    assert [(tmp_path / name / "mine").stat().st_uid for name in ("notebooks", "exercises")] == [1234] * 2, (
        done
    )
