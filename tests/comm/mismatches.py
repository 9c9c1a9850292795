"""Call collectives that do not fit together, and return the error that all ranks raise."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from lab.ranks import run_ranks


def told(call: Callable[[], object]) -> str:
    """The text of the CommError that `call` raises; '' when it raises none."""
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
    """What all ranks are told when each does `call(rank)`; the group must work before and after."""

    def bring(cluster) -> str:
        assert works()
        text = told(lambda: call(cluster.rank))
        assert works(), "the group is of no use after the mismatch"
        return text

    texts = run_ranks(bring, n, group_timeout=10)
    assert texts[0] and len(set(texts)) == 1, f"not the same on all ranks: {texts}"
    return texts[0]
