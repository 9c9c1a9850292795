"""Replace the computing of attention by a clock, so that ranks which share cores show the true waiting times.

Attention sleeps for a time that is proportional to the pairs of a query and a key that it would compute; the
backward sleeps twice as long. Everything else takes next to no time. Messages and the all-reduce of
the gradients are real, but carry zeros.
"""

import time

import torch
from torch import Tensor

from context_parallel.block_attention import Kernel
from context_parallel.sequence_cut import Part
from lab.models.model import GPT, GPTConfig


def clock(seconds: float, length: int) -> Kernel:
    """Return a kernel that sleeps: causal attention of `length` tokens takes `seconds`."""
    each = seconds_per_pair(seconds, length)

    def attend(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + part.pairs * each
        made = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
        _sleep_until(end)  # to make the zeros takes some of the time
        return made

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        end = time.perf_counter() + 2 * part.pairs * each
        made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _sleep_until(end)
        return made

    return Kernel(attend, backward)


def seconds_per_pair(seconds: float, length: int) -> float:
    """Return the time of a pair of a query and a key; causal attention has length (length + 1) / 2 pairs."""
    return seconds / (length * (length + 1) / 2)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class ClockedGPT(GPT):
    """A GPT that computes only attention, of zeros: for a kernel that sleeps."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self._zeros = [torch.zeros_like(parameter) for parameter in self.parameters()]

    def forward(self, tokens_bt: Tensor, positions_t: Tensor | None = None) -> Tensor:
        """Return `logits_btv` of zeros: all vocabulary entries are equally likely."""
        config, (b, t) = self.config, tokens_bt.shape
        y = _ZeroGradients.apply(self._zeros, *self.parameters())
        for block in self.blocks:
            heads = (config.num_heads, config.kv_heads, config.kv_heads)
            e = config.width // config.num_heads
            y = block.attention.attend_by_head(*(y.expand(b, h, t, e).contiguous() for h in heads)).sum()
        return y.expand(b, t, config.vocab_size)


class _ZeroGradients(torch.autograd.Function):
    """Return a zero whose backward gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx, zeros: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.zeros = zeros
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(zeros.clone() for zeros in ctx.zeros)
