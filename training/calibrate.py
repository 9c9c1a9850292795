"""Measure what a job's link and devices reach: alpha and beta of an all-reduce, and the FLOP/s of a matmul.

The two numbers of an all-reduce come from the times of a tiny one and a large one.

`measure_link` (comm.patterns) measures what the wire can do. This measures what an all-reduce gets out of
the wire, with its Python, its copies and its arithmetic, on cores that all ranks share.
"""

import statistics

import torch

from comm import collectives, cost
from comm.cost import Link
from comm.exchange import exchange
from comm.wire import slow_link
from lab.trace.stream_clock import time_when_done

TINY_BYTES, PROBE_BYTES, LARGE_BYTES = 8, 16 << 10, 4 << 20
REPEATS = 5
SECONDS = 1.5  # for all runs of a size; one run may take longer
MATMUL_WINDOWS, MATMUL_SECONDS = 3, 0.01


def measure_all_reduce(pattern: str, device: torch.device | None = None) -> Link:
    """Return the alpha and beta that explain the times of all-reduces. All ranks must call it.

    They come from medians of REPEATS all-reduces on `device`; on a slow link there are fewer, of smaller
    tensors. With "auto" they are those of the pattern for large tensors. On a single rank both are 0.
    """
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return Link(0.0, 0.0)
    pattern = collectives.pattern_for("all_reduce", pattern, LARGE_BYTES)

    def seconds(num_bytes: int) -> float:
        """Return the median of the slowest rank's seconds, so that all ranks decide the same."""
        tensor, times = torch.zeros(num_bytes // 4, device=device), list[float]()
        while len(times) <= REPEATS and sum(times) < SECONDS:
            with slow_link.slowed(None):
                collectives.barrier()
            start = time_when_done(device)
            collectives.all_reduce(tensor, pattern=pattern)
            times.append(max(exchange((time_when_done(device) - start) / 1e9)))
        return statistics.median(times[1:] or times)  # the first one warms up

    tiny = seconds(TINY_BYTES)
    per_byte = max(seconds(PROBE_BYTES) - tiny, 0.0) / PROBE_BYTES
    size = LARGE_BYTES
    while size > PROBE_BYTES and tiny + per_byte * size > SECONDS:
        size //= 2
    large = seconds(size)

    model = cost.formula_of("all_reduce", pattern)
    alphas = cost.seconds("all_reduce", model, 0, ranks, Link(1.0, 0.0))
    bytes_on_the_way = cost.seconds("all_reduce", model, size, ranks, Link(0.0, 1.0))
    return Link(tiny / alphas, max(large - tiny, 0.0) / bytes_on_the_way)


def measure_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of all ranks together, while all multiply large matrices. All ranks must call it.

    The share of it that a training reaches is its model FLOPs utilisation (MFU), with
    `GPTConfig.flops_per_token`. Ranks that share cores share their FLOP/s, so they multiply at the same time.
    """
    size, rates = 256, []
    while True:  # make the matrix larger, until starting a product takes little of its time
        # Random numbers, because a GPU that multiplies ones needs less power, and is faster.
        matrix = torch.randn(size, size, device=device).to(dtype) / size
        matrix @ matrix  # the first one warms up
        start = time_when_done(device)
        matrix @ matrix
        if size == 8192 or time_when_done(device) - start > MATMUL_SECONDS * 1e9 / 10:
            break
        size *= 2
    collectives.barrier()
    for _ in range(MATMUL_WINDOWS):
        start = now = time_when_done(device)
        flops = 0.0
        while now - start < MATMUL_SECONDS * 1e9:
            matrix @ matrix
            flops += 2.0 * size**3
            now = time_when_done(device)
        rates.append(flops / (now - start) * 1e9)
    # The best window of all ranks together: other programs can only slow them down.
    return max(map(sum, zip(*exchange(rates), strict=True)))
