"""GPipe by hand. Write `AllForwardAllBackward.step` of pipeline_parallel/train_afab.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/train_afab.py yet: it has the
solution.

You may use:

    isend(tensor: torch.Tensor, dst: int, group: Group = None) -> AnyTransfer
        Start to send a contiguous tensor to rank `dst` of the group.
    recv(tensor: torch.Tensor, src: int, group: Group = None) -> None
        Receive, and wait.
    transfer.wait()
        Block until the message has arrived, or has left.
    self.device: torch.device

Check it with `python -m exercises check gpipe_by_hand`.
"""

import torch
from torch import Tensor

from comm.point_to_point import isend, recv
from lab.trace.timeline import span


def step(self, x: Tensor, y: Tensor) -> Tensor | None:
    """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

    The first rank uses the batch's input `x`, and the last rank its targets `y`. Both are divided
    along dim 0 into `self.microbatches`, after `self.begin_step(x, y)` has validated them.
    `self.stages[str(self.rank)]` is this rank's stage: `stage(x)` is its output, and on the last rank
    `stage(x, target)` the mean loss. `self.boundaries[self.rank]` has the shape and dtype of what it
    receives. `isend(tensor, peer)` starts a send, and `recv(tensor, peer)` receives. Compute in
    `with span(str(i), kind, action=letter, microbatch=i, stage=self.rank)`: "forward" and "F" for a
    forward, "backward" and "B" for a backward.
    """
    raise NotImplementedError("`AllForwardAllBackward.step` is not written yet.")
