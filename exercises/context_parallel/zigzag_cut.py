"""A cut that balances a causal mask. Write `SequenceCut.zigzag` and `SequenceCut.parts` of
context_parallel/sequence_cut.py.

Read notebooks/11_long_sequences.ipynb first. Do not open context_parallel/sequence_cut.py yet: it has the
solution.

You may use:

    _masked(part: Part, documents: Tensor, own: slice, visiting: slice) -> Iterator[Part]
    _pieces(length: int, number: int) -> list[slice]
    Part(queries: slice, keys: slice, is_causal: bool = False, mask: Tensor | None = None)
        Hold a part of the attention: some of a rank's queries, and keys that it has now.

Check it with `python -m exercises check zigzag_cut`.
"""

from collections.abc import Iterator
from typing import Self

from torch import Tensor

from context_parallel.sequence_cut import Part, _masked, _pieces


def zigzag(cls, length: int, ranks: int) -> Self:
    """Return the cut of a sequence in which each rank has an early and a late piece.

    `_pieces(length, number)` returns the slices of `number` pieces of almost equal lengths, in
    order. `cls` takes one tuple of slices for each rank: first its early piece, then its late one.
    All ranks shall have equally much to compute under a causal mask.
    """
    raise NotImplementedError("`SequenceCut.zigzag` is not written yet.")


def parts(
    self, rank: int, source: int, is_causal: bool = True, documents: Tensor | None = None
) -> Iterator[Part]:
    """Yield the parts of the attention of a rank's queries to the keys of rank `source`.

    `self._placed(rank)` yields the pieces of a rank: a slice of the sequence's positions, and a
    slice that says where the piece lies among the rank's own tokens. A Part takes the second
    kind, and pieces are compared by the first. Leave out parts whose keys are all later than
    their queries. If `documents` is given, `_masked(part, documents, own, visiting)` yields the
    part with its mask, or nothing; `own` and `visiting` are the positions.
    """
    raise NotImplementedError("`SequenceCut.parts` is not written yet.")
