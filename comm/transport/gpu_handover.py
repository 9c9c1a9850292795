"""Hand a GPU's tensors to another thread: it uses them once they are computed, on a stream of its own.

      caller's stream           |■■ a ■■|■■ b ■■|■■ c ■■|■■ d ■■|       launched far ahead of the device
      the thread's own stream           |copy a|                        as soon as a is there

On the caller's stream the copy of a would stand behind d. On another one it would be too early, unless it
waits for the event that stands behind a. And when the thread says that it is done, its stream has to be.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_streams = threading.local()


class Handover:
    """Marks what the caller has given its GPU to do so far, before another thread may touch the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait until it is done; the block's own work on the GPU is done at its end."""
        self._event.synchronize()
        stream = _own_stream(self._device)
        with torch.cuda.stream(stream):  # and on this device: a thread begins with the first one
            yield
            stream.synchronize()


def handover_of(tensors: Iterable[torch.Tensor]) -> Handover | None:
    """Return the handover of the caller's tensors; None where all are in host memory."""
    for tensor in tensors:
        if tensor.is_cuda:
            return Handover(tensor.device)
    return None


def taken(handover: Handover | None) -> AbstractContextManager[None]:
    """Return `handover.taken()`, if there is one."""
    return nullcontext() if handover is None else handover.taken()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the calling thread's stream on the device."""
    if getattr(_streams, "device", None) != device:
        _streams.device, _streams.stream = device, torch.cuda.Stream(device)
    return _streams.stream
