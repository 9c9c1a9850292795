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
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from comm.cost import expected_traffic
from lab.models.model import GPT, FeedForward, GPTConfig
from lab.trace.ledger import Traffic
from lab.trace.memory import Observed
from lab.units import show_bytes, show_checked

Ops = list[tuple[str, int]]  # collectives, each with the number of elements of its full tensor


def block_figures(model: Any, observed: Observed, shape: Sequence[int]) -> dict[str, Any]:
    """Return the script's rows of the report, beside their formulas, for a GPT with full sequences.

    `model` is a TensorParallel, and `shape` that of the input: batch, time.
    """
    ranks, by_tokens = dist.get_world_size(model.group), model.sequence_parallel
    fields, sent = observed.fields(), observed.sent_bytes
    formula = ExpectedTraffic(model).of_parts(shape, ["blocks.0"]).bytes_sent
    fields["rows"]["a block sends"] = show_bytes(sent) + show_checked([sent], [formula])
    return fields | {
        "block_bytes": sent,
        "block_bytes_formula": formula,
        "activations_formula_bytes": activations_formula(model.plain.config, shape[0], ranks, by_tokens),
    }


class ExpectedTraffic:
    """The expected traffic of this rank for parts of a model: "token_embedding", "blocks.0" or "layers.0".

    `model` is a TensorParallel. The loss belongs to the head. `shape` is that of the input: batch, time for a
    GPT. Linear layers compute and send numbers of `computed_itemsize` bytes, which under torch.autocast are
    fewer than a parameter's.
    """

    def __init__(self, model: Any, computed_itemsize: int | None = None) -> None:
        self.model, self.plain = model, model.plain
        self.itemsize = next(model.parameters()).itemsize
        self.computed_itemsize = computed_itemsize or self.itemsize
        # Pairs of a column layer and a row layer in a block; experts take the place of an MLP.
        blocks = self.plain.blocks if isinstance(self.plain, GPT) else ()
        self.pairs = 1 + any(isinstance(block.mlp, FeedForward) for block in blocks)

    def of_parts(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return the traffic of these parts, forward and backward."""
        return sum(self._passes(shape, parts), Traffic())

    def of_recomputing(self, shape: Sequence[int], parts: Collection[str]) -> Traffic:
        """Return what is added where the backward computes the forward of these parts again, in one go."""
        return self._passes(shape, parts, rows_left_out=int(self.pairs == 2 and "head" not in parts))[0]

    def _passes(
        self, shape: Sequence[int], parts: Collection[str], rows_left_out: int = 0
    ) -> tuple[Traffic, Traffic]:
        """Return the traffic of the forward, without the last row layers, and that of the backward."""
        if not isinstance(self.plain, GPT):
            return self._passes_of_mlp(shape[0], parts)
        # The embedding communicates as a row layer, the head as a column layer.
        pairs = self.pairs * sum(part.startswith("blocks.") for part in parts)
        embeddings, heads = "token_embedding" in parts, "head" in parts
        tokens, width = shape[0] * shape[1], self.plain.config.width
        loss = [("all_reduce", tokens), ("all_reduce", 2 * tokens)] * heads
        row: Ops = [("all_reduce", tokens * width)]
        column: Ops = []
        row_backward: Ops = []
        column_backward = row
        if self.model.sequence_parallel:
            numel = shape[0] * (shape[1] + -shape[1] % dist.get_world_size(self.model.group)) * width
            row, column = [("reduce_scatter", numel)], [("all_gather", numel)]
            row_backward, column_backward = column, row + column * self.model.overlap
        forward = row * (pairs - rows_left_out) + column * (pairs + heads)
        backward = row_backward * pairs + column_backward * (pairs + heads)
        return (
            self.sum(forward, self.computed_itemsize) + self.sum(row * embeddings + loss, self.itemsize),
            self.sum(backward, self.computed_itemsize) + self.sum(row_backward * embeddings, self.itemsize),
        )

    def _passes_of_mlp(self, batch: int, parts: Collection[str]) -> tuple[Traffic, Traffic]:
        sizes, numbers = self.plain.sizes, [int(part.removeprefix("layers.")) for part in parts]
        last = len(sizes) - 2
        forward = [("all_reduce", batch * sizes[i + 1]) for i in numbers if i % 2]
        forward += [("all_gather", batch * sizes[-1])] * (last in numbers and last % 2 == 0)
        backward = [("all_reduce", batch * sizes[i]) for i in numbers if i % 2 == 0 and i]
        return self.sum(forward, self.computed_itemsize), self.sum(backward, self.computed_itemsize)

    def of_gradients(self, summed_numel: int) -> Traffic:
        """Return the traffic of gradients of which each rank has a term: together `summed_numel` numbers."""
        return self.sum([("all_reduce", summed_numel)] * self.model.sequence_parallel, self.itemsize)

    def sum(self, ops: Ops, itemsize: int) -> Traffic:
        """Return what this rank sends in the collectives, with the patterns that the group has chosen."""
        each = (expected_traffic(op, None, numel, itemsize, self.model.group) for op, numel in ops)
        return sum(each, Traffic())


def modules_of(names: Iterable[str]) -> set[str]:
    """Return the modules that parameters of these names belong to: blocks and layers with their numbers."""
    return {".".join(name.split(".")[: 1 + name.startswith(("blocks.", "layers."))]) for name in names}


def activations_formula(config: GPTConfig, batch: int, n: int, sequence_parallel: bool) -> float:
    """Return a forward's bytes, in 16 bits and with dropout: the formula of train_sequence_parallel.py."""
    s, h, a = config.block_size, config.width, config.num_heads
    outside = 10 / n if sequence_parallel else 10
    return config.num_layers * batch * s * h * (outside + 24 / n + 5 * a * s / (h * n))
