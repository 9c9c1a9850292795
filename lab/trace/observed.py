"""Count, in a model's first step, what autograd keeps of the forward, and what one part of the model sends.

observed = Observed(model, model.blocks[0])
...
with observed.forward():                 # only the first one is observed
    loss = loss_of(model(x), y)
loss.backward()
observed.kept_bytes, observed.sent_bytes
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from lab.trace.ledger import LEDGER
from lab.trace.memory import saved_activations


class Observed:
    """Holds `kept_bytes`, and `sent_bytes`: what `part` has sent in its forward and its backward."""

    def __init__(self, model: nn.Module, part: nn.Module | None = None) -> None:
        self._model, self._part = model, part
        self._hooks: list[RemovableHandle] = []
        self.kept_bytes: int | None = None
        self.sent_bytes = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Observe the forward in the block, and the backward that follows it."""
        if self.kept_bytes is not None:
            yield
            return
        if self._part is not None:
            self._hooks = [
                self._part.register_forward_pre_hook(lambda *_: self._count(-1)),
                self._part.register_forward_hook(lambda *_: self._count(1)),
                self._part.register_full_backward_pre_hook(lambda *_: self._count(-1)),
                self._part.register_full_backward_hook(lambda *_: self._count_for_the_last_time()),
            ]
        with saved_activations(self._model.parameters) as saved:
            yield
        self.kept_bytes = saved.bytes

    def _count(self, sign: int) -> None:
        self.sent_bytes += sign * LEDGER.total().bytes_sent

    def _count_for_the_last_time(self) -> None:
        self._count(1)
        for hook in self._hooks:
            hook.remove()
