"""Choose the transport of a group: how its messages travel.

    auto            shared memory where two ranks have it, else sockets
    shared_memory   a ring buffer (shared_memory.py)
    sockets         connections of our own: Unix sockets on one machine, else TCP (sockets.py)
    gloo            gloo's connections and threads (wire/wire.py)

All ranks of a group must choose the same. Groups that use nccl take none of these.
"""

import select
import weakref

import torch.distributed as dist

from comm.errors import CommError
from comm.transport import shared_memory
from comm.wire.wire import Group, group_of

TRANSPORTS = ("auto", "shared_memory", "sockets", "gloo")
CAN_POLL = hasattr(select, "poll")  # not on Windows
_default = "auto"
_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def use_transport(transport: str | None, group: Group = None) -> None:
    """Use this transport from now on: in one group, or for None in all groups that have none of their own.

    None as transport takes the choice back. Raise CommError if this system does not have the transport.
    """
    global _default
    if transport not in (None, *TRANSPORTS):
        raise CommError(f"There is no transport {transport!r}; choose one of {', '.join(TRANSPORTS)}.")
    if transport in ("sockets", "shared_memory") and not CAN_POLL:
        raise CommError(f"Transport {transport!r} polls sockets, which Windows cannot do; take 'gloo'.")
    if transport == "shared_memory" and not shared_memory.is_possible():
        raise CommError("Transport 'shared_memory' needs memory without a name, as Linux has; take 'auto'.")
    if group is None:
        _default = transport or "auto"
    elif transport is None:
        _chosen.pop(group_of(group), None)
    else:
        _chosen[group_of(group)] = transport


def chosen_transport(group: Group = None) -> str:
    """Return the transport of a group, one of TRANSPORTS."""
    chosen = _chosen.get(group_of(group), _default)
    return chosen if CAN_POLL else "gloo"
