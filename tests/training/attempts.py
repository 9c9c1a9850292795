"""Attempts at a run that is refused, or interrupted, and what it says."""

import os
import signal
from collections.abc import Iterable
from typing import Any
from unittest import mock

from lab.cluster import Cluster
from lab.launch.errors import Stopped, WorkbookError
from tests.data_parallel.test_scripts import train
from training.run import Run


def refusal(cluster: Cluster, name: str, **changes: Any) -> str:
    """Return why a script refuses these arguments; "" if it does not, or with a traceback."""
    try:
        train(cluster, name, **({"steps": 1} | changes))
    except WorkbookError as error:
        return str(error)
    except (ArithmeticError, RuntimeError, ValueError):
        return ""
    return ""


def the_one_sentence(texts: Iterable[str]) -> str:
    """Return what every rank says."""
    [text] = set(texts)
    assert text and "\n" not in text
    return text


def interrupted(
    cluster: Cluster, name: str, where: str, at: int, rank: int, by: int = signal.SIGINT, **changes: Any
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
            train(cluster, name, **changes)
        except Stopped as stopped:
            return f"{stopped.exit_code}: {stopped}"
    return ""
