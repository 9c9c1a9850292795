"""Choose the transport: how messages travel in all groups that do not use nccl.

auto            shared memory where two ranks have it, else sockets
shared_memory   a ring buffer (shared_memory.py)
sockets         connections of our own: Unix sockets on one machine, else TCP (sockets.py)
gloo            gloo's connections and threads (gloo_wire.py)
"""

import select

from comm.errors import CommError
from comm.wire import shared_memory

TRANSPORTS = ("auto", "shared_memory", "sockets", "gloo")
CAN_POLL = hasattr(select, "poll")  # not on Windows
_chosen = "auto"


def use_transport(transport: str | None) -> None:
    """Use this transport from now on, or "auto" for None. All ranks must choose the same.

    Raise CommError if this system does not have the transport.
    """
    global _chosen
    if transport not in (None, *TRANSPORTS):
        raise CommError(f"There is no transport {transport!r}; choose one of {', '.join(TRANSPORTS)}.")
    if transport in ("sockets", "shared_memory") and not CAN_POLL:
        raise CommError(f"Transport {transport!r} polls sockets, which Windows cannot do; take 'gloo'.")
    if transport == "shared_memory" and not shared_memory.is_possible():
        raise CommError("Transport 'shared_memory' needs memory without a name, as Linux has; take 'auto'.")
    _chosen = transport or "auto"


def chosen_transport() -> str:
    """Return the transport in use, one of TRANSPORTS."""
    return _chosen if CAN_POLL else "gloo"
