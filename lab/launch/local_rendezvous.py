"""Provide the rendezvous of `make run`: one agent on one machine, so there is no other agent to wait for.

torch's own rendezvous for this case (`torchrun --standalone`) opens its store on all interfaces, and
unpickles a state from it: a program that reaches the port can run code in the launcher. This rendezvous
listens on 127.0.0.1 and keeps no state. Agent and ranks write numbers and JSON into the store, and unpickle
nothing.
"""

import uuid
from datetime import timedelta

from torch import distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lab.launch.store import open_store

ADDRESS = "127.0.0.1"
NAME = "local"


class LocalRendezvous(RendezvousHandler):
    """Implement the rendezvous of a single agent, which shares its store with the ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = open_store(ADDRESS, 0, timedelta(minutes=1))

    def get_backend(self) -> str:
        """Return the name under which torchrun finds this handler."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Return True: the ranks use the agent's store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this agent's rank. torchrun also calls it when it restarts the ranks."""
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        """Return whether new agents are refused. There are none, so it returns False."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no new agents to refuse."""

    def num_nodes_waiting(self) -> int:
        """Return how many agents want to join: none."""
        return 0

    def get_run_id(self) -> str:
        """Return the id that the ranks get as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the store closes with the process."""
        return True


def register() -> list[str]:
    """Register the handler, and return the arguments with which torchrun uses it."""
    rendezvous_handler_registry.register(NAME, _handler)
    # Port 0 means any free port, so that two jobs can run at the same time.
    return [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={ADDRESS}:0", f"--rdzv-id={uuid.uuid4()}"]


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)
