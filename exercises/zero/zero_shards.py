"""A rank's shard of each parameter. Write `FlatLayout.split` of zero/shards.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/shards.py yet: it has the solution.

Check it with `python -m exercises check zero_shards`.
"""

from torch import Tensor


def split(self, shard: Tensor) -> list[tuple[int, Tensor]]:
    """Return for each parameter at which element this rank's shard of it starts, and a view of it.

    The parameters, with `self.sizes` numbers each, stand one after the other in a flat tensor.
    `shard` is this rank's part of it, which the slice `self.mine` of the flat tensor is. If a
    parameter is not in this rank's part, the view is empty, and starts at 0.
    """
    raise NotImplementedError("`FlatLayout.split` is not written yet.")
