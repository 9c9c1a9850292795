"""Start processes with the variables of a rendezvous, as ranks on several machines."""

import os
import socket

import torch

from comm import collectives, rendezvous
from comm.membership import meeting
from lab.ranks import RankError, run_ranks

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "BACKEND",
    "JOIN_TIMEOUT",
    "OP_TIMEOUT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "LOCAL_WORLD_SIZE",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
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


def join_with(environment: dict[str, object]) -> tuple[int, int, float]:
    """Join with these variables, add up the ranks, and leave; return rank, world size and the sum."""
    set_variables(environment)
    meeting._TELL, meeting._LINGER = 0.3, 0.5
    cluster = rendezvous.join()
    total = torch.tensor([float(cluster.rank)])
    collectives.all_reduce(total)
    rendezvous.leave(cluster)
    return cluster.rank, cluster.world_size, total.item()


def meet(*environments: dict[str, object], timeout: float = 40) -> list:
    """Start one process for each environment; return what it returned, or the last line of its error."""

    def come(cluster):
        return join_with(environments[cluster.rank])

    results = run_ranks(come, len(environments), backend=None, collect_failures=True, timeout=timeout)
    return [str(r).strip().splitlines()[-1] if isinstance(r, RankError) else r for r in results]


def places(ranks: list[int], world_size: int, **others) -> list[dict[str, object]]:
    same = {"WORLD_SIZE": world_size, "MASTER_PORT": free_port(), "JOIN_TIMEOUT": 20, **others}
    return [{"RANK": rank, **same} for rank in ranks]
