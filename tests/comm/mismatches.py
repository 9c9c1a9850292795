"""Call collectives that do not fit together, and return the error that all ranks raise."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from lab.ranks import run_ranks


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


def sentence_of_all(n: int, call: Callable[[int], object]) -> str:
    """Return the error of all ranks, when each does `call(rank)`. The group works before and after it."""

    def bring(cluster) -> str:
        assert works()
        text = error_text(lambda: call(cluster.rank))
        assert works(), "the group does not work after the mismatch"
        return text

    texts = run_ranks(bring, n, group_timeout=10)
    assert texts[0] and len(set(texts)) == 1, f"not the same on all ranks: {texts}"
    return texts[0]
