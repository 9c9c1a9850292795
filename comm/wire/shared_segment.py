"""Share one segment of memory among all ranks of a group, with a part for each rank.

      | nonce | tensor of rank 0 | tensor of rank 1 | tensor of rank 2 |        mapped by all ranks

The segment has no name (memfd, Linux), as those of segment.py. One rank makes it. The others open it as a
file of that rank's process, which the kernel allows to processes of the same user. A rank does not trust the
process id and the descriptor alone: the segment must begin with the random bytes that its maker has sent to
the group.
"""

import mmap
import os
import secrets
import sys
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm.wire.wire import Group, group_of

if sys.platform == "linux":
    import fcntl

NONCE_BYTES = 16
_PAGE = 4096
_OFFSET_BITS = 44


@dataclass(frozen=True)
class _Place:
    """The part of this rank in a segment. `memory` refers to it weakly: it is freed with its last tensor."""

    memory: "weakref.ReferenceType[mmap.mmap]"
    group: "weakref.ReferenceType[dist.ProcessGroup]"
    start: int  # the address of this rank's part
    num_bytes: int  # of each rank's part
    number: int  # of the segment in its group, from 1


_places: dict[int, _Place] = {}  # by `start`
_counts: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def make(ranks: int, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor, which the caller closes, and the memory of a new segment. Raise OSError."""
    size = _size(ranks, num_bytes)
    descriptor = os.memfd_create("workbook", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # else a full memory would end the process at the first use
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    memory[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
    return descriptor, memory


def open_of(pid: int, descriptor: int, nonce: bytes, ranks: int, num_bytes: int) -> mmap.mmap:
    """Return the segment of another process. Raise OSError if it may not be opened, or is not that one."""
    # What lies there may be anything, so opening it must not wait for it.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", flags)
    try:
        size = _size(ranks, num_bytes)
        seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS)
        # Without the seal its maker could shorten it while it is in use, and this process would end.
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(opened).st_size != size:
            raise OSError("this is not a segment of the workbook")
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if memory[:NONCE_BYTES] != nonce:
        raise OSError("this is another segment")
    return memory


def tensor_of(
    memory: mmap.mmap, num_bytes: int, numel: int, dtype: torch.dtype, group: Group
) -> torch.Tensor:
    """Return the tensor of this rank in a segment of the group, whose parts have `num_bytes` each."""
    process_group = group_of(group)
    number = _counts[process_group] = _counts.get(process_group, 0) + 1
    mine = _view(memory, process_group.rank(), num_bytes, 0, dtype, numel)
    start = mine.data_ptr()
    freed = weakref.ref(memory, lambda _: _places.pop(start, None))
    _places[start] = _Place(freed, weakref.ref(process_group), start, num_bytes, number)
    return mine


def place_of(tensor: torch.Tensor, group: Group) -> int:
    """Return a number that is equal on all ranks whose tensors are at the same place of the same segment.

    Return 0 for a tensor that the ranks of this group do not share.
    """
    found = _find(tensor, group)
    return found.number << _OFFSET_BITS | (tensor.data_ptr() - found.start) if found else 0


def of_all_ranks(tensor: torch.Tensor, group: Group) -> list[torch.Tensor] | None:
    """Return the flat tensors of all ranks at this place, in rank order; None if they are not shared."""
    found = _find(tensor, group)
    memory = found.memory() if found else None
    if found is None or memory is None:
        return None
    inside, what = tensor.data_ptr() - found.start, (tensor.dtype, tensor.numel())
    return [_view(memory, rank, found.num_bytes, inside, *what) for rank in range(group_of(group).size())]


def _find(tensor: torch.Tensor, group: Group) -> _Place | None:
    at, process_group = tensor.data_ptr(), group_of(group)
    for place in list(_places.values()):  # another thread may free one
        if place.start <= at and at + tensor.nbytes <= place.start + place.num_bytes:
            is_whole = tensor.nbytes > 0 and tensor.is_contiguous()
            return place if is_whole and place.group() is process_group else None
    return None


def _view(
    memory: mmap.mmap, rank: int, num_bytes: int, inside: int, dtype: torch.dtype, numel: int
) -> torch.Tensor:
    offset = _PAGE + rank * _in_pages(num_bytes) + inside
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def _size(ranks: int, num_bytes: int) -> int:
    return _PAGE + ranks * _in_pages(num_bytes)


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
