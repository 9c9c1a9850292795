"""ZeRO 3: gather, use, free. Write `Unit.start_gather`, `Unit.gather`, `Unit.free` and
`FullyShardedDataParallel._before_forward` of zero/train_zero3.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero3.py yet: it contains the solution.
All that you need is in this file, in the notebook and in the hints.

You may use:

    all_gather(full, shard, group=None, async_op=False, pattern=None) -> Work
        Write all shards, in rank order, to each rank's `full`.
    is_in_a_backward() -> bool
        Return whether a backward is running; a forward inside one recomputes activations.
    self._begin_turn(block: ShardedBlock) -> None
        Note that a block runs its forward, so that its backward is recognised.
    self._gathering
    self._hide() -> None
        Make the parameters stand-ins, so that nothing refers to `full`.
    self._order: list[ShardedBlock]
        Those of the forward before, which tell what to prefetch.
    self._seen: list[ShardedBlock]
        The blocks that this forward has run.
    self._show() -> None
        Make the parameters views of `full`, and add the unit to those that are full.
    self._version
        An optimizer step changes it, and makes `full` stale.
    self._wait_for_gather() -> None
        Wait for the gather that is in flight.
    self.dtype
    self.flat.mine
    self.flat.numel
    self.flat: Flat
    self.full
    self.group
    self.pattern
    self.shard

Check it with `python -m exercises check zero3`.
"""

import torch

from comm.collectives import all_gather
from zero.blocks import ShardedBlock
from zero.freed import is_in_a_backward


def start_gather(self) -> None:
    """Start to gather the parameters, unless that has been done: `self.full` is None if it has not.

    Note the shard's version, `self.shard._version`, in `self._version`. `self.full` becomes a flat
    tensor of `self.flat.numel` numbers of `self.dtype` on the shard's device. This rank's part of it
    is the slice `self.flat.mine`. The handle goes into `self._gathering`; nothing waits here.
    """
    raise NotImplementedError(
        "ZeRO 3: gather, use, free is not written yet: `Unit.start_gather` has no body."
    )


def gather(self) -> None:
    """Return when all of `full` is there, and the module's parameters are views of it.

    `self._wait_for_gather()` waits for the handle, and sets `self._gathering` to None.
    `self._show()` makes the parameters views of `full`. A unit that is full already is left as it
    is.
    """
    raise NotImplementedError("ZeRO 3: gather, use, free is not written yet: `Unit.gather` has no body.")


def free(self) -> None:
    """Free the memory of the full parameters.

    `self._hide()` ends what `self._show()` began: then no parameter refers to `full`. A unit may
    also have been prefetched and not used, and then its memory must not be freed before the
    message has arrived.
    """
    raise NotImplementedError("ZeRO 3: gather, use, free is not written yet: `Unit.free` has no body.")


def _before_forward(self, block: ShardedBlock) -> None:
    """Wait for the block's parameters, and prefetch those of the next block.

    A backward that recomputes activations comes here, too: if is_in_a_backward(), call
    `block.gather()`, and nothing else. Otherwise call `self._begin_turn(block)` first.
    `self._seen` is the list of blocks that this forward has run, with this one from now on, and
    `self._order` that of the forward before. As long as the two agree, the next block is known:
    call its `start_gather()`.
    """
    raise NotImplementedError(
        "ZeRO 3: gather, use, free is not written yet: `FullyShardedDataParallel._before_forward` has no "
        "body."
    )
