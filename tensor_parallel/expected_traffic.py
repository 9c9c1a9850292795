"""Compute by formula what a rank sends in a step of a tensor-parallel model, and what it keeps of a forward.

A is the number of bytes that a rank sends to all-reduce batch * time * width numbers.

                         tensor parallel         with sequence parallelism
    block, forward       2 A                     2 gathers and 2 scatters: 2 A
    block, backward      2 A                     the same: 2 A; with overlap 2 more gathers: 3 A
    embedding and head   A forward, A backward   2 gathers and 2 scatters; with overlap 3 gathers
    loss                 3 numbers per token     3 numbers per token
    gradients            nothing                 an all-reduce of the replicated parameters

A backward that recomputes blocks sends again what their forward has sent, except for the last all-reduce or
scatter. No backward needs its result, so torch.utils.checkpoint stops before it.

A row layer of an MLP all-reduces its outputs, a column layer the gradient of its inputs. A column layer at
the end gathers its outputs.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from comm.collectives import Group, chosen_pattern
from comm.cost import expected_traffic
from lab.models.model import GPTConfig
from lab.trace.ledger import Traffic

_LISTS = ("blocks.", "layers.")
Ops = list[tuple[str, int]]  # collectives, each with the number of elements of its full tensor


@dataclass
class ExpectedTraffic:
    """The expected traffic of this rank for a GPT of these sizes, or an MLP whose layers have these sizes.

    `parts` are names of modules of the model (`parts_of`): "token_embedding", "blocks.0" or "layers.0". The
    loss belongs to the head. `shape` is that of the input: batch, time for a GPT. A parameter's numbers have
    `itemsize` bytes. Linear layers compute and send numbers of `computed_itemsize` bytes, which are fewer
    under torch.autocast. `has_mlps` is False where experts have taken the places of the MLPs.
    """

    sizes: GPTConfig | Sequence[int]
    group: Group
    sequence_parallel: bool
    overlap: bool
    itemsize: int
    computed_itemsize: int
    has_mlps: bool = True

    def of_parts(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return the traffic of these parts, forward and backward."""
        return sum(self._passes(shape, parts), Traffic())

    def of_recomputing(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return what is added where the backward computes the forward of these parts again, in one go."""
        stops_before_its_end = isinstance(self.sizes, GPTConfig) and self.has_mlps and "head" not in parts
        return self._passes(shape, parts, rows_left_out=int(stops_before_its_end))[0]

    def _passes(
        self, shape: Sequence[int], parts: Collection[str], rows_left_out: int = 0
    ) -> tuple[Traffic, Traffic]:
        """Return the traffic of the forward, without the last row layers, and that of the backward."""
        if not isinstance(self.sizes, GPTConfig):
            return self._passes_of_mlp(shape[0], parts)
        # A block has two pairs of a column layer and a row layer, or without an MLP one. The embedding
        # communicates as a row layer, the head as a column layer.
        pairs = (1 + self.has_mlps) * sum(part.startswith("blocks.") for part in parts)
        embeddings, heads = "token_embedding" in parts, "head" in parts
        tokens = shape[0] * shape[1]
        loss = [("all_reduce", tokens), ("all_reduce", 2 * tokens)] * heads
        row: Ops = [("all_reduce", tokens * self.sizes.width)]
        column, row_backward, column_backward = [], [], row
        if self.sequence_parallel:
            padded = shape[1] + -shape[1] % dist.get_world_size(self.group)
            numel = shape[0] * padded * self.sizes.width
            row, column = [("reduce_scatter", numel)], [("all_gather", numel)]
            row_backward, column_backward = column, row + column * self.overlap
        layers = row * (pairs - rows_left_out) + column * (pairs + heads)
        layers_backward = row_backward * pairs + column_backward * (pairs + heads)
        return (
            self.sum(layers, self.computed_itemsize) + self.sum(row * embeddings + loss, self.itemsize),
            self.sum(layers_backward, self.computed_itemsize)
            + self.sum(row_backward * embeddings, self.itemsize),
        )

    def _passes_of_mlp(self, batch: int, parts: Collection[str]) -> tuple[Traffic, Traffic]:
        numbers, last = [int(part.removeprefix("layers.")) for part in parts], len(self.sizes) - 2
        forward = [("all_reduce", batch * self.sizes[i + 1]) for i in numbers if i % 2]
        forward += [("all_gather", batch * self.sizes[-1])] * (last in numbers and last % 2 == 0)
        backward = [("all_reduce", batch * self.sizes[i]) for i in numbers if i % 2 == 0 and i]
        return self.sum(forward, self.computed_itemsize), self.sum(backward, self.computed_itemsize)

    def of_gradients(self, summed_numel: int) -> Traffic:
        """Return the traffic of gradients of which each rank has a term: together `summed_numel` numbers."""
        return self.sum([("all_reduce", summed_numel)] * self.sequence_parallel, self.itemsize)

    def sum(self, ops: Ops, itemsize: int) -> Traffic:
        """Return what this rank sends in the collectives, with the patterns that the group has chosen."""
        total = Traffic()
        for op, numel in ops:
            total += expected_traffic(op, chosen_pattern(op, self.group), numel, itemsize, self.group)
        return total


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the modules that parameters of these names belong to: blocks and layers with their numbers."""
    return {".".join(name.split(".")[: 2 if name.startswith(_LISTS) else 1]) for name in names}


def activations_formula(config: GPTConfig, batch: int, n: int, sequence_parallel: bool) -> float:
    """Return a forward's bytes by Korthikanti et al. 2022, equations 2 and 4, for 16 bit, with dropout.

    s b h (10 + 24/n + 5 a s / (h n)) for each layer of s tokens, b examples, width h and a heads on n ranks;
    with sequence parallelism the 10 is divided by n, too.
    """
    s, h, a = config.block_size, config.width, config.num_heads
    outside = 10 / n if sequence_parallel else 10
    return config.num_layers * batch * s * h * (outside + 24 / n + 5 * a * s / (h * n))
