"""Cut a sequence among n ranks, and say which part of the attention is between which two ranks.

      contiguous, n = 4      [  0   |  1   |  2   |  3   ]        rank r has chunk r of n
      zigzag, n = 4          [0 |1 |2 |3 |3 |2 |1 |0 ]            rank r has chunks r and 2n-1-r of 2n

Under a causal mask a query attends to the keys before it. So the queries at the end of a sequence have most
to do: with long contiguous chunks the last of n ranks computes 2n-1 times as much as the first one. With the
zigzag cut each rank has an early and a late chunk, and all ranks compute equally much in each step of the
ring. Here are the parts for two ranks. In a part with 1 all pairs attend, in one with 1/2 those on and below
the diagonal.

      keys of rank         0    1                keys of rank         0    1    1    0
      queries of rank 0   1/2            1/2     queries of rank 0   1/2                    1/2
      queries of rank 1    1   1/2       3/2     queries of rank 1    1   1/2               3/2
                                                 queries of rank 1    1    1   1/2          5/2
                                                 queries of rank 0    1    1    1   1/2     7/2

At the left rank 1 has three times the work of rank 0. At the right both have 4 units. Chunks need not have
equal lengths: as in torch.tensor_split the first ones are a token longer. The zigzag cut is that of Zhu,
"ring-flash-attention", 2024, and of Llama 3 (Grattafiori et al., 2024, arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from comm.shards import shard_sizes


@dataclass(frozen=True)
class AttentionPart:
    """Hold a part of the attention: some of a rank's queries, and keys that it has now.

    `queries` are some of this rank's tokens, `keys` some of the other rank's, both counted from 0. With
    `is_causal` query i attends to the keys up to i, and with a `mask` (batch, 1, queries, keys) where it is
    true; else to all.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    mask: Tensor | None = None

    @property
    def pairs(self) -> float:
        """Return how many pairs of a query and a key are computed, in one head of one example."""
        queries, keys = (part.stop - part.start for part in (self.queries, self.keys))
        return queries * (keys + 1) / 2 if self.is_causal else queries * keys


@dataclass(frozen=True)
class SequenceCut:
    """Hold the chunks of a sequence that each rank has, as slices of its positions."""

    chunks: tuple[tuple[slice, ...], ...]

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> Self:
        """Return the cut in which rank r has the r-th of n chunks."""
        return cls(tuple((chunk,) for chunk in _chunks(length, ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Self:
        """Return the cut in which each rank has an early and a late chunk."""
        chunks = _chunks(length, 2 * ranks)
        return cls(tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks)))

    def length(self, rank: int) -> int:
        """Return how many tokens a rank has."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks[rank])

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in the sequence."""
        return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in self.chunks[rank]])

    def own(self, full: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's tokens of a full tensor."""
        return torch.cat([full.narrow(dim, p.start, p.stop - p.start) for p in self.chunks[rank]], dim)

    def parts(
        self, rank: int, source: int, is_causal: bool = True, documents: Tensor | None = None
    ) -> Iterator[AttentionPart]:
        """Yield the parts of the attention of a rank's queries to the keys of rank `source`.

        `documents` (batch, time) has a number for each token of the full sequences: then a token attends only
        to tokens of its own document. Parts in which no pair attends are left out.
        """
        for own, queries in self._placed(rank):
            for visiting, keys in self._placed(source):
                if is_causal and visiting.start > own.start:
                    continue  # these keys are later than all queries
                part = AttentionPart(queries, keys, is_causal and visiting.start == own.start)
                yield from [part] if documents is None else _masked(part, documents, own, visiting)

    def _placed(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Yield the chunks of a rank that are not empty, and where they lie among its tokens."""
        ends = list(accumulate(chunk.stop - chunk.start for chunk in self.chunks[rank]))
        for chunk, end in zip(self.chunks[rank], ends, strict=True):
            if chunk.stop > chunk.start:
                yield chunk, slice(end - (chunk.stop - chunk.start), end)


def _masked(part: AttentionPart, documents: Tensor, own: slice, visiting: slice) -> Iterator[AttentionPart]:
    same = documents[:, own, None] == documents[:, None, visiting]
    if same.all():
        yield part
    elif same.any():
        if part.is_causal:
            same = same.tril()
        yield AttentionPart(part.queries, part.keys, mask=same.unsqueeze(1))


def _chunks(length: int, number: int) -> list[slice]:
    ends = list(accumulate(shard_sizes(length, number)))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


Cut = Callable[[int, int], SequenceCut]  # from a sequence's length and the number of ranks
CUTS: dict[str, Cut] = {"zigzag": SequenceCut.zigzag, "contiguous": SequenceCut.contiguous}


def documents_of(tokens_bt: Tensor) -> Tensor:
    """Return the number of each token's document; one begins after each empty line."""
    is_newline = tokens_bt == ord("\n")
    begins = torch.zeros_like(tokens_bt)
    begins[:, 2:] = is_newline[:, :-2] & is_newline[:, 1:-1] & ~is_newline[:, 2:]
    return begins.cumsum(1)
