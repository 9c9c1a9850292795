"""The rendezvous of `make run`: one agent on one machine, which has no other agent to agree with.

torch's own for this case (`torchrun --standalone`) opens its store on all interfaces and unpickles a state
that it finds there: anyone who reaches the port can run code in the launcher. This one listens on 127.0.0.1
and keeps no state; agent and ranks write numbers and JSON into the store, and nothing in it is unpickled.
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

from lab.store import open_store

ADDRESS = "127.0.0.1"
NAME = "local"


class LocalRendezvous(RendezvousHandler):
    """The agent's side: it is alone, and shares its store with the ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = open_store(ADDRESS, 0, timedelta(minutes=1))

    def get_backend(self) -> str:
        """Return the name under which torchrun finds this handler."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Return whether the ranks may use the store, too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this agent's place, again after a restart of the ranks."""
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        """Return whether agents are sent away: no other ever comes."""
        return False

    def set_closed(self) -> None:
        """Do nothing, see `is_closed`."""

    def num_nodes_waiting(self) -> int:
        """Return how many agents want to join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id that the ranks see as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the store closes with the process."""
        return True


def register() -> list[str]:
    """Let torchrun find the handler; returns the arguments with which torchrun takes it."""
    rendezvous_handler_registry.register(NAME, _handler)
    # Port 0 is a free one, so that two runs can stand side by side.
    return [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={ADDRESS}:0", f"--rdzv-id={uuid.uuid4()}"]


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)
