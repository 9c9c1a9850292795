"""Run a function, or a script as torchrun would start it, on ranks with a fake GPU each, or on real GPUs."""

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.cluster import Cluster
from lab.launch.devices import num_gpus
from lab.ranks import RankError, run_ranks
from tests.comm.places import free_port

ROOT = Path(__file__).resolve().parent.parent.parent

SHORT = ("--steps", "3", "--size", "tiny", "--batch-size", "8")


def on_gpus(fn: Callable[..., Any], *args: Any, ranks: int = 2, **environment: str) -> list[Any]:
    """Return what `fn(cluster, *args)` returns on each rank, with these variables set."""
    of_test = {name: os.environ[name] for name in os.environ if name.startswith("FAKE_")}
    environment = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"} | of_test | environment

    def run(cluster: Cluster) -> Any:
        os.environ.update(environment)
        return fn(cluster, *args)

    return run_ranks(run, ranks, device="cuda", backend=backend_for(ranks))


def backend_for(ranks: int) -> str:
    """Return "nccl" if each rank has a GPU of its own, else "gloo", with which ranks share a GPU."""
    return "nccl" if num_gpus() >= ranks else "gloo"


def run_script(
    script: str,
    *arguments: str,
    ranks: int = 2,
    prepare: Callable[[], None] = lambda: None,
    **environment: str,
) -> dict[str, Any]:
    """Run the script on each rank with --json, and return the JSON that rank 0 printed as its last line.

    Each rank calls `prepare` first. With FAKE_DIE the survivors are not ended: they must end themselves.
    """
    port = free_port()

    def run(cluster: Cluster) -> str:
        place = {"RANK": cluster.rank, "WORLD_SIZE": ranks, "LOCAL_RANK": cluster.rank}
        place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        # Ranks have imported comm/channels.py, which sets this to 0. Without it, joining sets it to 1.
        has_channels = script.startswith(("pipeline", "hybrid"))
        order = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0" if has_channels else "1"}
        os.environ.update({"BACKEND": backend_for(ranks)} | order | environment)
        sys.argv = [script, *arguments, "--json"]
        prepare()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        return output.getvalue()

    printed, *_ = run_ranks(run, ranks, backend=None, collect_failures="FAKE_DIE" in environment)
    if isinstance(printed, RankError):
        raise printed
    return json.loads(printed.splitlines()[-1])
