"""Make groups of ranks that wait as long as the job's own group does, and not torch's 30 minutes."""

import torch.distributed as dist

from comm.wire.wire import name_axis, timeout_of
from lab.launch.gloo_threads import keep_from_preempting


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Form a group of these ranks. All ranks of the job must call it, members or not."""
    return dist.new_group(ranks, timeout=timeout_of(None))


def own_group(groups: list[list[int]], axis: str = "") -> dist.ProcessGroup:
    """Form groups of ranks that have no rank in common, and return that of this rank.

    All ranks of the job must call it with the same `groups`. What the group sends counts for the axis.
    """
    own = dist.new_subgroups_by_enumeration(groups, timeout=timeout_of(None), group_desc=axis)[0]
    keep_from_preempting()  # else gloo's threads would take the cores from computing
    name_axis(own, axis)
    return own
