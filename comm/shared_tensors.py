"""Make tensors that all ranks of a group can read and write, because they share its memory.

gradients = shared_tensors.zeros(numel, torch.float32)      # on all ranks of the group
all_reduce(gradients, pattern="in_place")                   # no message: see comm/algorithms/in_place.py

A part of the tensor will do as well, if all ranks take the same one. Where the ranks cannot share memory, as
on two machines, in two containers or on nccl, the tensor is an ordinary one, on the device of the group.
"""

import mmap
import os
from contextlib import suppress

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.exchange import exchange
from comm.transport.segment import is_possible
from comm.wire import shared_segment
from comm.wire.wire import Group, group_of, message_device


def zeros(numel: int, dtype: torch.dtype = torch.float32, group: Group = None) -> torch.Tensor:
    """Return a flat tensor of `numel` zeros in memory that all ranks of the group share, if they can.

    All ranks of the group call it together, with the same arguments. The memory is freed with the last tensor
    that lies in it. Raise CommError, on all ranks, if there is not enough memory.
    """
    num_bytes = numel * dtype.itemsize
    memory = _shared_memory(num_bytes, group)
    if memory is None:
        return torch.zeros(numel, dtype=dtype, device=message_device(group))
    return shared_segment.tensor_of(memory, num_bytes, numel, dtype, group)


def are_shared(tensor: torch.Tensor, group: Group = None) -> bool:
    """Return whether the ranks of the group share the memory of this tensor."""
    return shared_segment.place_of(tensor, group) != 0


def _shared_memory(num_bytes: int, group: Group) -> mmap.mmap | None:
    """Return the memory that rank 0 makes for the group, or None if a rank cannot map it."""
    ranks = group_of(group).size()
    if ranks == 1 or dist.get_backend(group) == "nccl":
        return None
    memory, descriptor, error = None, -1, ""
    try:
        if dist.get_rank(group) == 0 and is_possible() and num_bytes:
            try:
                descriptor, memory = shared_segment.make(ranks, num_bytes)
            except OSError as failed:
                error = failed.strerror or str(failed)
        nonce = memory[: shared_segment.NONCE_BYTES].hex() if memory else ""
        offers = exchange((num_bytes, os.getpid(), descriptor, nonce, error), group)
        sizes = [size for size, *_ in offers]
        if len(set(sizes)) > 1:
            raise CommError(f"All ranks must share tensors of the same size; they ask for {sizes} bytes.")
        _, pid, number, nonce, error = offers[0]
        if error:
            raise CommError(
                f"There is not enough memory for {ranks} shared tensors of {num_bytes} bytes ({error}); "
                "free some."
            )
        if nonce and memory is None and is_possible():
            with suppress(OSError):  # then no rank uses it
                memory = shared_segment.open_of(pid, number, bytes.fromhex(nonce), ranks, num_bytes)
        everyone_has_it = all(exchange(memory is not None, group))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return memory if everyone_has_it else None
