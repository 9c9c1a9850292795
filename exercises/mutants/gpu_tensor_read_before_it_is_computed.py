"""On a GPU an asynchronous collective sometimes reduces a tensor's old content: it waits for no kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from comm.transport.gpu_handover import Handover

TARGET = "comm.transport.gpu_handover.Handover.taken"
KILLER = (
    "tests.comm.test_gpu_handover.test_it_waits_for_what_was_launched_before_and_not_for_what_comes_after"
)


@contextmanager
def mutant(self: Handover) -> Iterator[None]:
    stream = torch.cuda.Stream(self._device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()
