"""Replace computing with a clock, so that a laptop with few cores still shows the cost of communication.

    model = metronome_of(GPT(config), seconds=0.01)
    loss_of(model(x), y).backward()         # gradients of zeros, each as late as a real layer's

Ranks that compute on the same cores slow each other down. Here a layer sleeps for a fixed time instead, as if
every rank had a device of its own: `seconds` in the forward, and twice that in the backward. Then it produces
its gradients, and their hooks run before the layer below begins.

If the link is busy from the first gradient on, a step of data parallel takes the ideal time:

    ideal = model.forward_seconds + model.last_layer_backward_seconds + wire_seconds
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lab.models.model import GPT


class Metronome(nn.Module):
    """Stand in for `model`: hold its parameters and sleep a fixed time in each layer, but compute nothing.

    `layers` are the parameters of each layer, first layer first, each parameter once. A tied one belongs to
    the layer whose backward completes its gradient. `seconds` is the time of a layer in the forward.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Sequence[nn.Parameter]], seconds: float, vocab_size: int
    ) -> None:
        super().__init__()
        self.model = model
        self.layers = [tuple(layer) for layer in layers]
        self.seconds = seconds
        self.vocab_size = vocab_size

    @property
    def forward_seconds(self) -> float:
        return len(self.layers) * self.seconds

    @property
    def backward_seconds(self) -> float:
        return 2 * self.forward_seconds

    @property
    def last_layer_backward_seconds(self) -> float:
        """Return the time from the start of the backward until it has the first gradients."""
        return 2 * self.seconds

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Return `logits_btv` of zeros: all vocabulary entries are equally likely."""
        # x requires a gradient, so that the backward passes through all layers, even if the first is frozen.
        x = next(self.parameters()).new_zeros(()).requires_grad_()
        for layer in self.layers:
            x = _Tick.apply(x, self.seconds, *layer)
        return x.expand(*tokens_bt.shape, self.vocab_size)


def metronome_of(gpt: GPT, seconds: float) -> Metronome:
    """Return a metronome with one layer for each block; a layer takes `seconds` in the forward."""
    tied = gpt.head.weight is gpt.token_embedding.weight
    layers = [list(block.parameters()) for block in gpt.blocks]
    layers[0] = [*gpt.token_embedding.parameters(), *gpt.position_embedding.parameters(), *layers[0]]
    layers[-1] += [*gpt.final_norm.parameters(), *([] if tied else gpt.head.parameters())]
    return Metronome(gpt, layers, seconds, gpt.config.vocab_size)


class _Tick(torch.autograd.Function):
    """Run one layer. Its scalar input and output give the layers their order in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *parameters: nn.Parameter) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*parameters)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        end = time.perf_counter() + 2 * ctx.seconds
        # New tensors in the parameters' layout, so that autograd keeps them as `grad` without a copy. Filling
        # them takes milliseconds in a large layer, and is part of the layer's time.
        grads = [
            torch.zeros_like(parameter) if needed else None
            for parameter, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        time.sleep(max(0.0, end - time.perf_counter()))
        return grad, None, *grads
