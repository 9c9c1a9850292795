"""Replace the computing of attention by a clock, so that ranks which share cores show the true waiting times.

Attention sleeps for a time that is proportional to the pairs of a query and a key that it would compute; the
backward sleeps twice as long. Its results are zeros, but the messages and all other layers are real: these
take next to no time in a small model.
"""

import time

import torch
from torch import Tensor

from context_parallel.block_attention import Kernel
from context_parallel.sequence_cut import AttentionPart


def clock(seconds: float, length: int) -> Kernel:
    """Return a kernel that sleeps: causal attention of `length` tokens takes `seconds`."""
    each = seconds_per_pair(seconds, length)

    def attend(q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + part.pairs * each
        made = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
        _sleep_until(end)  # to make the zeros takes some of the time
        return made

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: AttentionPart
    ) -> tuple[Tensor, Tensor, Tensor]:
        end = time.perf_counter() + 2 * part.pairs * each
        made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _sleep_until(end)
        return made

    return Kernel(attend, backward).drawn()


def seconds_per_pair(seconds: float, length: int) -> float:
    """Return the time of a pair of a query and a key; causal attention has length (length + 1) / 2 pairs."""
    return seconds / (length * (length + 1) / 2)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))
