"""Short runs of train scripts: as they end, as they are refused, and as they are interrupted."""

import os
import signal
from typing import Any
from unittest import mock

from lab.cluster import Cluster
from lab.launch.errors import Stopped, WorkbookError
from tests import run_modes
from training.run import Run

NAMES = {name: f"data_parallel_{name}" for name in ("naive", "overlap", "ddp")}
NAMES |= {"bucket": "data_parallel_bucket_overlap", "accumulation": "data_parallel_naive_grad_accumulation"}
NAMES |= {"cnn": "data_parallel_ddp"}
OWN: dict[str, dict[str, Any]] = {"cnn": {"model": "baby_cnn", "batch_size": 240, "lr": 1e-2}}
OWN |= {mode: {"microbatches": 4} for mode in ("pipeline_afab", "pipeline_1f1b_by_hand", "pipeline_1f1b")}
STEPS = 4
SHORT = {"size": "tiny", "batch_size": 12, "lr": 3e-3, "steps": STEPS}


def train(cluster: Cluster, mode: str, **changes: Any) -> dict[str, Any]:
    """Run the script of a mode with a tiny model, and return this rank's report."""
    options = []
    for name, value in (SHORT | OWN.get(mode, {}) | changes).items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return run_modes.train(cluster, NAMES.get(mode, mode), *options)


def refusal(cluster: Cluster, mode: str, **changes: Any) -> str:
    """Return why a script refuses these arguments; "" if it does not, or with a traceback."""
    try:
        train(cluster, mode, **({"steps": 1} | changes))
    except WorkbookError as error:
        return str(error)
    except (ArithmeticError, RuntimeError, ValueError):
        return ""
    return ""


def interrupted(
    cluster: Cluster, mode: str, where: str, at: int, rank: int, by: int = signal.SIGINT, **changes: Any
) -> str:
    """Train, with a signal for one rank when it calls this method of Run for the `at`-th time.

    Returns the code and sentence of Stopped; "" if the run came to its end.
    """
    original, calls = getattr(Run, where), 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and cluster.rank == rank:
            os.kill(os.getpid(), by)
        return original(*args, **kwargs)

    with mock.patch.object(Run, where, method):
        try:
            train(cluster, mode, **changes)
        except Stopped as stopped:
            return f"{stopped.exit_code}: {stopped}"
    return ""
