"""Measure how fast this machine computes and copies, for the planner.

      flops             a matrix product of a small GPT's layer
      attention_flops   the fused kernel, which skips the half that the causal mask removes
      bandwidth         a GELU, which reads and writes each element
      layer_seconds     a GPT layer with a single token: the time of Python and of the calls of kernels
      handling          all-reduces of one element and of 4 MiB: the CPU time of all threads for a call, and
                        for each byte that is sent

All times are CPU times of the thread or of the process. That clock stands still while others have the core.
So the rates are those of a core, however many ranks share it and whatever else the machine does.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from comm import cost
from comm.collectives import all_reduce, barrier
from comm.transport import slow_link
from comm.transport.wire import Group
from lab.models.model import SIZES, Block

ROWS, HEADS, TIME, HEAD_WIDTH = 512, 8, 256, 64
COPIED_BYTES = 4 << 20


@dataclass(frozen=True)
class Rates:
    """Holds the operations and bytes per second of a core, and the seconds to call the kernels of a layer."""

    flops: float
    attention_flops: float
    bandwidth: float
    layer_seconds: float


@dataclass(frozen=True)
class Handling:
    """Holds the CPU seconds that a collective takes on a rank: for the call, and for each sent byte."""

    call: float = 0.0
    byte: float = 0.0

    def seconds(self, calls: float, num_bytes: float) -> float:
        """Return the CPU seconds of `calls` collectives that send `num_bytes` together."""
        return calls * self.call + num_bytes * self.byte


NO_HANDLING = Handling()


@cache
def measure_rates() -> Rates:
    """Return the rates of this machine, measured with one thread. It takes about a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        width = HEADS * HEAD_WIDTH
        x, weight, wide = torch.randn(ROWS, width), torch.randn(width, width), torch.randn(ROWS, 4 * width)
        heads = torch.randn(2, HEADS, TIME, HEAD_WIDTH)
        scores = 2 * 2 * HEADS * TIME * TIME * HEAD_WIDTH  # two products, of which the mask leaves a half
        block, token = Block(SIZES["tiny"]), torch.randn(1, 1, SIZES["tiny"].width)
        return Rates(
            flops=2 * ROWS * width * width / usual(lambda: F.linear(x, weight)),
            attention_flops=2 * scores / 2 / usual(lambda: attend(heads)),
            bandwidth=2 * wide.nbytes / usual(lambda: F.gelu(wide)),
            layer_seconds=usual(lambda: block(token)),
        )
    finally:
        torch.set_num_threads(threads)


def attend(heads: torch.Tensor) -> torch.Tensor:
    """Return causal self-attention with `heads` as queries, keys and values."""
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def measure_handling(pattern: str, group: Group = None, repeats: int = 5) -> Handling:
    """Return the CPU time that an all-reduce takes on a rank. All ranks must call it."""
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return NO_HANDLING
    sent = cost.seconds("all_reduce", "ring", COPIED_BYTES, ranks, cost.Link(0.0, 1.0))  # bytes: 1 s each
    with slow_link.slowed(None):
        barrier(group)
        call, large = (
            usual(
                partial(all_reduce, torch.zeros(numel), group=group, pattern=pattern),
                time.process_time,
                repeats,
            )
            for numel in (1, COPIED_BYTES // 4)
        )
    return Handling(call, max(0.0, large - call) / sent)


def usual(
    call: Callable[[], object], clock: Callable[[], float] = time.thread_time, repeats: int = 30
) -> float:
    """Return the median seconds of a call on the clock: the usual speed, not the best one."""
    call()
    seconds = []
    for _ in range(repeats):
        start = clock()
        call()
        seconds.append(clock() - start)
    return statistics.median(seconds)
