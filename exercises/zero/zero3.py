"""ZeRO 3: gather, use, free. Write `Unit.start_gather`, `Unit.gather`, `Unit.free` and
`FullyShardedDataParallel._before_forward` of zero/train_zero3.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero3.py yet: it has the solution.

You may use:

    all_gather(full, shard, group=None, async_op=False, pattern=None) -> Work
        Write all shards, in rank order, to each rank's `full`.
    is_in_backward() -> bool
        Return whether autograd runs a backward in this thread.
    self.group: Group, self.pattern: str | None
    work.wait()
        Block until the operation has ended.

Check it with `python -m exercises check zero3`.
"""

from typing import Any

import torch

from comm.collectives import all_gather
from zero.train_zero3 import is_in_backward


def start_gather(self) -> None:
    """Start to gather the parameters, unless that has been done: nothing waits here.

    `self.full`, a flat tensor, has a storage of size 0 while it is freed (`self.is_freed`), and of
    `self.full.nbytes` otherwise. This rank's part of it is the slice `self.layout.mine`, and
    `self.shard` has the values. The handle goes into `self._gathering`. Note in `self._version`
    which version of the shard was gathered, `self.shard._version`. If it is not freed and
    `self.is_stale`, free it first: an optimizer step has changed the shard since the last gather.
    """
    raise NotImplementedError("`Unit.start_gather` is not written yet.")


def gather(self) -> None:
    """Return when all of `full` is there, and the module's parameters are views of it.

    `self._gathering` is the handle of a gather that was started, or None. The data of each of
    `self.layout.parameters` becomes one of `self.layout.views(self.full)`. A unit that is full
    already is left as it is.
    """
    raise NotImplementedError("`Unit.gather` is not written yet.")


def free(self) -> None:
    """Free the memory of the full parameters, and let each parameter's data be NaN in its shape.

    A unit may also have been prefetched and not used: its memory must not be freed before the
    message has arrived.
    """
    raise NotImplementedError("`Unit.free` is not written yet.")


def _before_forward(self, i: int, *_: Any) -> None:
    """Wait for the parameters of block `i`, and prefetch those of the next block.

    `self.blocks` has the list of units of each block. A backward that recomputes activations
    comes here, too: if is_in_backward(), prefetch nothing.
    """
    raise NotImplementedError("`FullyShardedDataParallel._before_forward` is not written yet.")
