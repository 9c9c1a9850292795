"""Compute by formula what a rank sends in a step of a tensor-parallel GPT or MLP.

A is the number of bytes that a rank sends to all-reduce batch * time * width numbers.

                         tensor parallel         with sequence parallelism
    block, forward       2 A                     2 gathers and 2 scatters: 2 A
    block, backward      2 A                     the same: 2 A; with overlap 2 more gathers: 3 A
    embedding and head   A forward, A backward   2 gathers and 2 scatters; with overlap 3 gathers
    loss                 4 numbers per token     4 numbers per token
    gradients            nothing                 an all-reduce of the replicated parameters

A backward that recomputes blocks sends again what their forward has sent, except for the last all-reduce or
scatter. No backward needs its result, so torch.utils.checkpoint stops before it.

A row layer of an MLP all-reduces its outputs, a column layer the gradient of its inputs. A column layer at
the end gathers its outputs.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch.distributed as dist

from comm.chosen_pattern import chosen_pattern
from comm.collectives import Group
from comm.expected import expected
from lab.models.model import GPTConfig
from lab.trace.ledger import Traffic

_LISTS = ("blocks.", "layers.")
Ops = list[tuple[str, int]]  # collectives, each with the number of elements of its full tensor


@dataclasses.dataclass
class ExpectedTraffic:
    """The expected traffic of this rank; `itemsize` is the bytes of each number of a parameter.

    `parts` are names of modules of the model (`parts_of`): "token_embedding", "blocks.0" or "layers.0". The
    loss belongs to the head. `shape` is that of the input: batch, time for a GPT. Linear layers compute and
    send numbers of `computed_itemsize` bytes, which are fewer under torch.autocast.
    """

    group: Group
    itemsize: int
    computed_itemsize: int

    def of_parts(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return the traffic of these parts, forward and backward."""
        raise NotImplementedError

    def of_recomputing(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return what is added where the backward computes the forward of these parts again, in one go."""
        raise NotImplementedError

    def of_gradients(self, summed_numel: int) -> Traffic:
        """Return the traffic of gradients of which each rank has a term: together `summed_numel` numbers."""
        return Traffic()

    def sum(self, ops: Ops, itemsize: int) -> Traffic:
        """Return what this rank sends in the collectives, with the patterns that the group has chosen."""
        each = (
            expected(op, chosen_pattern(op, self.group), numel, itemsize, self.group) for op, numel in ops
        )
        return sum(each, Traffic())


@dataclasses.dataclass
class ExpectedGPTTraffic(ExpectedTraffic):
    """The expected traffic of this rank for a GPT.

    A block has two column and two row layers, or without an MLP one of each. The embedding communicates as a
    row layer, the head as a column layer.
    """

    config: GPTConfig
    sequence_parallel: bool
    overlap: bool
    has_mlps: bool = True

    def of_parts(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        stream, blocks = self._stream_numel(*shape), _num_blocks(parts)
        row, column = [("all_reduce", stream)], [("all_reduce", stream)]
        if self.sequence_parallel:
            scatter_and_gather = [("reduce_scatter", stream), ("all_gather", stream)]
            row, column = scatter_and_gather, scatter_and_gather + [("all_gather", stream)] * self.overlap
        pairs = (1 + self.has_mlps) * blocks
        layers = row * pairs + column * (pairs + ("head" in parts))
        ends = row * ("token_embedding" in parts) + self._loss(shape, parts)
        return self.sum(layers, self.computed_itemsize) + self.sum(ends, self.itemsize)

    def of_recomputing(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        stream, blocks, has_head = self._stream_numel(*shape), _num_blocks(parts), "head" in parts
        row, column = [("all_reduce", stream)], []
        if self.sequence_parallel:
            row, column = [("reduce_scatter", stream)], [("all_gather", stream)]
        pairs = (1 + self.has_mlps) * blocks
        layers = row * (pairs - (self.has_mlps and not has_head)) + column * (pairs + has_head)
        ends = row * ("token_embedding" in parts) + self._loss(shape, parts)
        return self.sum(layers, self.computed_itemsize) + self.sum(ends, self.itemsize)

    def of_gradients(self, summed_numel: int) -> Traffic:
        return self.sum([("all_reduce", summed_numel)] * self.sequence_parallel, self.itemsize)

    def _loss(self, shape: Sequence[int], parts: Collection[str]) -> Ops:
        batch, time = shape
        return [("all_reduce", batch * time), ("all_reduce", 3 * batch * time)] * ("head" in parts)

    def _stream_numel(self, batch: int, time: int) -> int:
        """Return the number of elements of the residual stream, including padding tokens."""
        ranks = dist.get_world_size(self.group)
        padded = time + -time % ranks if self.sequence_parallel else time
        return batch * padded * self.config.width


@dataclasses.dataclass
class ExpectedMLPTraffic(ExpectedTraffic):
    """The expected traffic of this rank for an MLP of linear layers with these sizes."""

    sizes: Sequence[int]

    def of_parts(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        backward = [("all_reduce", shape[0] * self.sizes[i]) for i in _numbers(parts) if i % 2 == 0 and i]
        return self._forward(shape[0], parts) + self.sum(backward, self.computed_itemsize)

    def of_recomputing(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        return self._forward(shape[0], parts)

    def _forward(self, rows: int, parts: Collection[str]) -> Traffic:
        last = len(self.sizes) - 2
        ops = [
            ("all_reduce" if i % 2 else "all_gather", rows * self.sizes[i + 1])
            for i in _numbers(parts)
            if i % 2 or i == last
        ]
        return self.sum(ops, self.computed_itemsize)


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the modules that parameters of these names belong to: blocks and layers with their numbers."""
    return {".".join(name.split(".")[: 2 if name.startswith(_LISTS) else 1]) for name in names}


def _num_blocks(parts: Collection[str]) -> int:
    return sum(part.startswith("blocks.") for part in parts)


def _numbers(parts: Collection[str]) -> list[int]:
    return [int(part.removeprefix("layers.")) for part in parts if part.startswith("layers.")]
