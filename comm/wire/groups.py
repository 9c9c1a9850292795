"""Form groups of ranks, and say what errors, messages and timeouts need to know about one.

A group that torch forms waits 30 minutes for a rank. The groups formed here wait as long as the job's own.
"""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from lab.launch.gloo_threads import keep_from_preempting

Group = dist.ProcessGroup | None
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection was likely closed")

# A copy of a wrapper sends in the same group.
dist.ProcessGroup.__deepcopy__ = lambda group, memo: group  # type: ignore[attr-defined]


def group_of(group: Group) -> dist.ProcessGroup:
    """Return the group, or the group of all ranks for None. Raise CommError if there is none yet."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # else the compiler would report an error of its own
        raise CommError(
            "torch.compile cannot trace communication: compile only layers that do not communicate."
        )
    world = dist.group.WORLD
    if world is None:
        raise CommError("There is no process group yet: call comm.rendezvous.join() first.")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise CommError(f"Rank {dist.get_rank()} is not in this group; only its members may call this.")
    return group or world


_timeouts: "weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta]" = weakref.WeakKeyDictionary()


def timeout_of(group: Group) -> timedelta:
    """Return how long an operation of the group may take: as long as one of the job's own group, at most.

    torch gives a group that the user forms 30 minutes, whatever the job's group has.
    """
    if (timeout := _timeouts.get(own := group_of(group))) is None:
        world = group_of(None)
        backend = torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
        timeout = min(each._get_backend(backend).options._timeout for each in (own, world))
        _timeouts[own] = timeout
    return timeout


def wait_for(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Block until `work` is done. With nccl only the current stream waits."""
    if dist.get_backend(group) == "nccl":  # with a timeout of our own the host would wait, too
        work.wait()
    else:
        work.wait(timeout_of(group))


_axes: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def name_axis(group: Group, axis: str) -> None:
    """Let the ledger count the messages of a group as those of an axis of a mesh, from now on."""
    _axes[group_of(group)] = axis


def axis_of(group: Group) -> str:
    """Return the name that the group got from `name_axis`, or an empty one."""
    return _axes.get(group_of(group), "")


def message_device(group: Group) -> torch.device:
    """Return the device on which a message of this group must be: nccl sends from its GPU only."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of the group's members among all ranks of the job, as error messages name them."""
    return [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]


def peer_trouble(text: str, peer: str) -> str:
    """Return the cause of an error of gloo, as the end of a sentence.

    It names the rank that left first, if that is known (membership/liveness.py), else `peer`.
    """
    timed_out = "imed out" in text or "imeout" in text
    if gone := liveness.cause(patience=0.0 if timed_out else 1.0):
        return str(gone)
    if timed_out:
        return (
            f"it waited until the timeout; {peer} has not reached this point, is stuck or is paused, "
            "or waits for a rank that is"
        )
    if is_lost_connection(text):
        return f"it lost the connection; {peer} has died or left, so look for the first error in its log"
    return f"it failed: {text}"


def is_lost_connection(text: str) -> bool:
    """Return whether an error of gloo or of torch's store says that a peer closed the connection."""
    return any(sign in text for sign in _LOST)


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
