"""Compute replaced by a clock, so that a laptop with fewer cores than ranks shows what communication costs.

    model = metronome_of(GPT(config), seconds=0.01)
    loss_of(model(x), y).backward()         # gradients of zeros, each layer's as late as a real one's

Ranks that compute on the same cores slow each other down, and that hides what the wire does. Here a layer
sleeps for a fixed time instead, as if every rank had a device of its own: forward, first layer first, takes
`seconds` a layer, and backward, last layer first, twice that, for the gradients of the input and the weights.
After its sleep a layer hands over the gradients of its parameters, and hooks on them run before the layer
below begins. What the loss, hooks and the optimizer do takes its own time on top.

The ideal step of data parallel, with all else hidden: when the wire is the bottleneck, it is busy from the
first gradient on, so that forward + backward of the last layer + wire time pass:

    ideal = model.forward_seconds + model.last_layer_backward_seconds + wire_seconds
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lab.model import GPT


class Metronome(nn.Module):
    """Keeps the time of `model`, and its parameters, without computing anything.

    `layers` are the parameters of each layer, first layer first, and together those of `model`, each once: a
    tied one belongs where backward completes its gradient. `seconds` is a layer's time in forward. ValueError
    if there is no layer, or `layers` does not hold every parameter of `model` once.

    Frozen parameters get no gradient, but save no time either.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Sequence[nn.Parameter]], seconds: float, vocab_size: int
    ) -> None:
        super().__init__()
        given = sorted(id(parameter) for layer in layers for parameter in layer)
        if not given or given != sorted(id(parameter) for parameter in model.parameters()):
            raise ValueError("the layers must hold every parameter of the model exactly once")
        self.model = model
        self.layers = [tuple(layer) for layer in layers]
        self.seconds = seconds
        self.vocab_size = vocab_size

    @property
    def forward_seconds(self) -> float:
        """The time of the whole forward pass."""
        return len(self.layers) * self.seconds

    @property
    def backward_seconds(self) -> float:
        """The time of the whole backward pass."""
        return 2 * self.forward_seconds

    @property
    def last_layer_backward_seconds(self) -> float:
        """How long backward takes until it has the first gradients."""
        return 2 * self.seconds

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Tokens to `logits_btv`, all zero: every token is as likely as any other."""
        # It requires a gradient for backward to pass through all layers, even if the first one is frozen.
        x = next(self.parameters()).new_zeros(()).requires_grad_()
        for layer in self.layers:
            x = _Tick.apply(x, self.seconds, *layer)
        return x.expand(*tokens_bt.shape, self.vocab_size)


def metronome_of(gpt: GPT, seconds: float) -> Metronome:
    """A metronome of one layer per block, `seconds` each in forward.

    The embeddings belong to the first layer, the final norm and the head to the last. A tied head is the
    token embedding, and its gradient is complete only in the first.
    """
    tied = gpt.head.weight is gpt.token_embedding.weight
    layers = [list(block.parameters()) for block in gpt.blocks]
    layers[0] = [*gpt.token_embedding.parameters(), *gpt.position_embedding.parameters(), *layers[0]]
    layers[-1] += [*gpt.final_norm.parameters(), *([] if tied else gpt.head.parameters())]
    return Metronome(gpt, layers, seconds, gpt.config.vocab_size)


class _Tick(torch.autograd.Function):
    """One layer. A scalar in and out carries the order of the layers into the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *parameters: nn.Parameter) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*parameters)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        end = time.perf_counter() + 2 * ctx.seconds
        # Fresh ones in the parameters' layout, for which autograd keeps them as `grad` without a copy. To
        # fill them takes milliseconds in a large layer: that is part of the layer's time.
        grads = [
            torch.zeros_like(parameter) if needed else None
            for parameter, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        time.sleep(max(0.0, end - time.perf_counter()))
        return grad, None, *grads
