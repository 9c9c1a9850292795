"""A rank's shard of the gradients of some parameters; the whole lives only while it is on its way.

      backward      gradient ─► [ room for all ] ── reduce-scatter, mean ───► [shard]; the room is given back

Stages 2 and 3 of ZeRO both keep gradients so: stage 2 a bucket at a time, stage 3 a block.
"""

from collections import deque

import torch
from torch import Tensor

from comm.collectives import Group, Work, reduce_scatter
from data_parallel.flat import Flat
from lab.timeline import span


class GradientShard:
    """Gradients of the parameters of `flat`. They add up in `shard`, of `dtype`, until `clear`.

    What is sent has `wire_dtype`. The bucket is called `name` on the timeline.
    """

    def __init__(
        self,
        name: str,
        flat: Flat,
        dtype: torch.dtype,
        group: Group = None,
        pattern: str | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.flat, self.name = flat, name
        self._group, self._pattern, self._wire_dtype = group, pattern, wire_dtype or dtype
        self._dtype = dtype
        self.shard: Tensor | None = None
        self._room: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: set[int] = set()
        self._arriving: tuple[Tensor, Work] | None = None

    @property
    def num_bytes(self) -> int:
        """Of the room, while there is one."""
        return self.flat.numel * self._wire_dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Whether the room is full, and can be reduced."""
        return self._room is not None and not self._missing

    def put(self, position: int, gradient: Tensor) -> None:
        """Take the gradient of the parameter at that position of the flat; the caller need not keep it."""
        if self._room is None:
            self._make_room(gradient.device)
        self._missing.remove(position)
        self._views[position].copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def fill_up(self, device: torch.device) -> None:
        """What has no gradient on this rank counts as zero."""
        if self._room is None:
            self._make_room(device)
        for position in self._missing:
            self._views[position].zero_()
        self._missing = set()

    def _make_room(self, device: torch.device) -> None:
        self._room = torch.empty(self.flat.numel, dtype=self._wire_dtype, device=device)
        self._room[self.flat.numel - self.flat.padding :].zero_()
        self._views = self.flat.views(self._room)
        self._missing = set(range(len(self._views)))

    def reduce(self) -> None:
        """Start to send the room's contents to their owners."""
        assert self._room is not None
        with span(self.name, "launch", lane="launches", bytes=self._room.nbytes):
            arriving = self._room.new_empty(self.flat.shard_numel)
            handle = reduce_scatter(
                arriving, self._room, op="mean", group=self._group, async_op=True, pattern=self._pattern
            )
        self._arriving = arriving, handle

    def wait(self) -> None:
        """Add what has arrived to the shard, and give the room back."""
        assert self._arriving is not None
        (arrived, handle), self._arriving = self._arriving, None
        handle.wait()
        self._room, self._views = None, []
        if self.shard is None:
            self.shard = arrived.to(self._dtype)
        else:
            self.shard += arrived

    def clear(self) -> None:
        """Forget what has added up."""
        self.shard = None


class OnTheWay:
    """Reductions under way, few enough that the rooms never add up to the whole gradient: `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._started: deque[GradientShard] = deque()

    def start(self, gradients: GradientShard) -> None:
        """Reduce; first wait for the oldest where there are too many."""
        while self._started and sum(g.num_bytes for g in (gradients, *self._started)) > self._most_bytes:
            self._started.popleft().wait()
        gradients.reduce()
        self._started.append(gradients)

    def finish(self) -> None:
        """Wait for all."""
        while self._started:
            self._started.popleft().wait()
