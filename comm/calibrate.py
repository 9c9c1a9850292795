"""alpha and beta as the collectives of a group meet them: from the times of a tiny one and a large one.

A ping-pong (comm.point_to_point) tells what the wire can do; this tells what an all-reduce gets out of it,
with its Python, its copies and its arithmetic, on cores that all ranks share. Predictions want that.
"""

import statistics
import time

import torch

from comm import collectives, cost
from comm.cost import Link
from comm.wire import Group

TINY_BYTES, LARGE_BYTES = 8, 4 << 20


def measure_all_reduce(
    pattern: str, group: Group = None, repeats: int = 5, device: torch.device | None = None
) -> Link:
    """alpha and beta that explain the times of this group's all-reduces; the same numbers on every rank.

    Medians of all-reduces of tensors on `device`. Both are 0 on a single rank. All ranks must call it.
    """
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return Link(0.0, 0.0)
    tiny, large = (_seconds(size, pattern, group, repeats, device) for size in (TINY_BYTES, LARGE_BYTES))
    model = cost.model_of("all_reduce", pattern)
    alphas = cost.seconds("all_reduce", model, 0, ranks, Link(1.0, 0.0))
    bytes_on_the_way = cost.seconds("all_reduce", model, LARGE_BYTES, ranks, Link(0.0, 1.0))
    return Link(tiny / alphas, max(large - tiny, 0.0) / bytes_on_the_way)


def _seconds(num_bytes: int, pattern: str, group: Group, repeats: int, device: torch.device | None) -> float:
    """Median time of an all-reduce on its slowest rank."""
    tensor, times = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(1 + repeats):
        collectives.barrier(group)
        start = time.perf_counter()
        collectives.all_reduce(tensor, group=group, pattern=pattern)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    collectives.all_reduce(slowest, op="max", group=group, pattern=pattern)
    return statistics.median(slowest.tolist())
