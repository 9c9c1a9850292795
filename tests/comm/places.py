"""Start processes with the variables of a rendezvous, as ranks on several machines."""

import os
import socket
from collections.abc import Callable
from typing import Any

from lab.ranks import run_ranks

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("JOIN_TIMEOUT", "OP_TIMEOUT", "BACKEND", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def free_port() -> int:
    """Return a port that the system gives to nobody else for a minute.

    On a port whose last connection was closed a moment ago (TIME_WAIT), a program can listen that asks for it
    by its number; the system never chooses it for others. A port that was only free could be taken before a
    slow launcher listens on it. The idea is from Yelp's ephemeral-port-reserve.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            listener.accept()[0].close()
        return address[1]


def set_variables(environment: dict[str, object]) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in environment.items()})


def places(ranks: list[int], world_size: int, **others) -> list[dict[str, object]]:
    same = {"WORLD_SIZE": world_size, "MASTER_PORT": free_port(), "JOIN_TIMEOUT": 20, **others}
    return [{"RANK": rank, **same} for rank in ranks]


def started(
    function: Callable[..., Any], environments: list[dict[str, object]], *args: Any, **options
) -> list:
    """Run `function(cluster, *args)` in a process for each environment; return results and errors."""

    def run(cluster: Any) -> Any:
        set_variables(environments[cluster.rank])
        return function(cluster, *args)

    return run_ranks(run, len(environments), backend=None, **{"collect_failures": True, **options})
