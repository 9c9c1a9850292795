"""Return the error of a call, and find out whether a group still works after it."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError


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
