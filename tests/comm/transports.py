"""Run a function on a rank with a transport; "tcp" means sockets as between machines."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from comm.transport.choice import use_transport
from lab.replace import replaced


def over(transport: str, cluster: Any, fn: Callable, *args: Any) -> Any:
    """Return what `fn(cluster, *args)` returns. Afterwards the group has its transport again."""
    is_tcp = transport == "tcp"
    # Ranks of one machine use Unix sockets where they can.
    elsewhere = replaced("comm.transport.sockets._unix_connection", lambda *_: None)
    with elsewhere if is_tcp else nullcontext():
        use_transport("sockets" if is_tcp else transport)
        try:
            return fn(cluster, *args)
        finally:
            use_transport(None)
