"""Compute by formula what a rank sends in a step of a tensor-parallel GPT.

A is the number of bytes that a rank sends to all-reduce batch * time * width numbers.

                         tensor parallel         with sequence parallelism
    block, forward       2 A                     2 gathers and 2 scatters: 2 A
    block, backward      2 A                     the same: 2 A; with overlap 2 more gathers: 3 A
    embedding and head   A forward, A backward   2 gathers and 2 scatters; with overlap 3 gathers
    loss                 4 numbers per token     4 numbers per token
    gradients            nothing                 an all-reduce of the replicated parameters
"""

import dataclasses

import torch.distributed as dist

from comm import cost
from comm.chosen_pattern import chosen_pattern
from comm.collectives import Group
from lab.ledger import Traffic
from lab.model import GPTConfig


@dataclasses.dataclass
class ExpectedTraffic:
    """The expected traffic of this rank for a GPT; `itemsize` is the bytes of each number of a parameter."""

    config: GPTConfig
    group: Group
    sequence_parallel: bool
    overlap: bool
    itemsize: int

    def of_block(self, batch: int, time: int) -> Traffic:
        """Return the traffic of one block, forward and backward."""
        stream = self._stream_numel(batch, time)
        if not self.sequence_parallel:
            return self._sum([("all_reduce", stream)] * 4)
        # Two column layers gather and scatter, with overlap gather again; two row layers scatter and gather.
        gathers = 6 if self.overlap else 4
        return self._sum([("all_gather", stream)] * gathers + [("reduce_scatter", stream)] * 4)

    def of_step(self, batch: int, time: int, summed_numel: int, is_clipped: bool) -> Traffic:
        """Return the traffic of a step that all-reduces gradients of `summed_numel` numbers at its end."""
        stream, tokens = self._stream_numel(batch, time), batch * time
        # The embedding communicates as a row layer does, the head as a column layer.
        rest = [("all_reduce", stream)] * 2
        if self.sequence_parallel:
            rest = [("all_gather", stream)] * (3 if self.overlap else 2) + [("reduce_scatter", stream)] * 2
            rest += [("all_reduce", summed_numel)]
        rest += [("all_reduce", tokens), ("all_reduce", 3 * tokens)]  # the cross entropy
        blocks = [self.of_block(batch, time)] * self.config.num_layers
        norm = self._sum([("all_reduce", 1)] * is_clipped, itemsize=8)
        return sum(blocks, self._sum(rest) + norm)

    def _stream_numel(self, batch: int, time: int) -> int:
        """Return the number of elements of the residual stream, including padding tokens."""
        ranks = dist.get_world_size(self.group)
        padded = time + -time % ranks if self.sequence_parallel else time
        return batch * padded * self.config.width

    def _sum(self, ops: list[tuple[str, int]], itemsize: int | None = None) -> Traffic:
        place = dist.get_world_size(self.group), dist.get_rank(self.group)
        itemsize = itemsize or self.itemsize
        each = (
            cost.per_rank(op, chosen_pattern(op, self.group), numel, itemsize, *place) for op, numel in ops
        )
        return sum(each, Traffic())
