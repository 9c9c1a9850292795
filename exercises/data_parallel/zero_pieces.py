"""A rank's piece of each parameter. Write `Flat.pieces` of data_parallel/flat.py.

Check it with `python -m exercises check zero_pieces`.
"""

from torch import Tensor


def pieces(self, shard: Tensor) -> list[tuple[int, Tensor]]:
    """Return for each parameter at which element its piece starts, and the piece, a view of `shard`.

    The parameters, with `self._sizes` numbers each, stand one after the other in a flat tensor.
    `self.mine`, a slice, is the part of the flat tensor that this rank's `shard` holds. If a
    parameter is not in the shard, its piece is empty, and starts at 0.
    """
    raise NotImplementedError(
        "A rank's piece of each parameter is not written yet: `Flat.pieces` has no body."
    )
