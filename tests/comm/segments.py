"""Shorten segments, so that small tensors travel in many of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from comm import shards
from lab.replace import replaced


@contextmanager
def short_segments(num_bytes: int) -> Iterator[None]:
    """Let every pattern split its tensors into segments of at most `num_bytes`, in all ranks."""
    with ExitStack() as stack:
        for name in [name for name in vars(shards) if name.endswith("SEGMENT_BYTES")]:
            stack.enter_context(replaced(f"comm.shards.{name}", num_bytes))
        # and some of them are read out of the sender's memory, as only long ones are otherwise
        stack.enter_context(replaced("comm.transport.memory_ends.LARGE_BYTES", num_bytes // 2))
        yield
