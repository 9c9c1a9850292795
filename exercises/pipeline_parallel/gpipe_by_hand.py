"""GPipe by hand. Write `AllForwardAllBackward.step` of pipeline_parallel/train_afab.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/train_afab.py yet: it contains the
solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    self.action: Callable[[str], AbstractContextManager[Any]]
    self.input_like: Tensor | None
    self.loss_of: Callable[[Tensor, Tensor], Tensor]
    self.messages: Any
    self.microbatches: int
    self.output_like: Tensor | None
    self.post_receives(like: Tensor, peer: int) -> list[tuple[Tensor, Any]]
        Post the receives of all microbatches at once, so that they arrive while this rank computes.
    self.rank: int
    self.ranks: int
    self.stage: Callable[[Tensor], Tensor]

Check it with `python -m exercises check gpipe_by_hand`.
"""

import torch
from torch import Tensor


def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

    The first rank gets the batch's input `x`, and the last rank its targets `y`; the others ignore
    both. Each is divided along dim 0 into `self.microbatches`. `self.stage` are this rank's layers,
    and `self.loss_of(output, targets)` the mean loss of a microbatch. `self.post_receives(like,
    peer)` posts the receives of all microbatches from a rank, and returns pairs of a buffer, like
    `self.input_like` or `self.output_like`, and a transfer. `self.messages.isend(tensor, peer)`
    starts a send. Compute each forward in `with self.action(f"F{i}")`, and each backward in `with
    self.action(f"B{i}")`.
    """
    raise NotImplementedError("GPipe by hand is not written yet: `AllForwardAllBackward.step` has no body.")
