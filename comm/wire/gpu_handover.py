"""Hand tensors on a GPU to another thread, which uses them on its own stream once they are computed.

      caller's stream           |■■ a ■■|■■ b ■■|■■ c ■■|■■ d ■■|       launched far ahead of the device
      the thread's own stream           |copy a|                        as soon as a is computed

On the caller's stream the copy of a would run after d. On another stream it would run too early, unless it
waits for an event that the caller records after a. When the thread reports that it is done, its stream must
be done too.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_streams = threading.local()


class Handover:
    """An event behind all work that the caller has launched so far. Another thread waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the event, run the block on the thread's own stream, and wait for that stream."""
        self._event.synchronize()
        stream = _own_stream(self._device)
        with torch.cuda.stream(stream):  # this also selects the device: a thread starts with device 0
            yield
            stream.synchronize()


def handover_of(tensors: Iterable[torch.Tensor]) -> Handover | None:
    """Return a handover for the caller's tensors, or None if all are in host memory."""
    for tensor in tensors:
        if tensor.is_cuda:
            return Handover(tensor.device)
    return None


def taken(handover: Handover | None) -> AbstractContextManager[None]:
    """Return `handover.taken()`, or a context that does nothing if there is no handover."""
    return nullcontext() if handover is None else handover.taken()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the calling thread's stream on the device."""
    if getattr(_streams, "device", None) != device:
        _streams.device, _streams.stream = device, torch.cuda.Stream(device)
    return _streams.stream
