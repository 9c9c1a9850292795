"""Change what ranks use for a test, return the error of a call, and find out whether a group still works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from comm.wire.transport import use_transport
from lab.replace import replaced


def error_text(call: Callable[[], object]) -> str:
    """Return the text of the CommError that `call` raises, or "" if it raises none."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def works(group=None) -> bool:
    x = torch.ones(5)
    collectives.all_reduce(x, group=group)
    return bool((x == dist.get_world_size(group)).all())


@contextmanager
def short_segments(num_bytes: int) -> Iterator[None]:
    """Let every pattern split its tensors into segments of at most `num_bytes`, in all ranks."""
    with replaced("comm.shards.SEGMENT_BYTES", num_bytes):
        yield


def over(transport: str, cluster: Any, fn: Callable, *args: Any) -> Any:
    """Return what `fn(cluster, *args)` returns over a transport; "tcp" means sockets as between machines.

    Afterwards the group has its transport again.
    """
    is_tcp = transport == "tcp"
    # Ranks of one machine use Unix sockets where they can.
    elsewhere = replaced("comm.wire.sockets._unix_connection", lambda *_: None)
    with elsewhere if is_tcp else nullcontext():
        use_transport("sockets" if is_tcp else transport)
        try:
            return fn(cluster, *args)
        finally:
            use_transport(None)
