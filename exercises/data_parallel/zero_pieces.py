"""A rank's piece of each parameter. Write `Flat.pieces` of data_parallel/flat.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open data_parallel/flat.py yet: it contains the
solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    self._sizes
    self.mine

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
