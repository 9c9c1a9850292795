"""The share of each rank. Write `DistributedSampler.__iter__` of data_parallel/sampler.py.

Read notebooks/01_ranks.ipynb first. Do not open data_parallel/sampler.py yet: it has the solution.

You may use:

    self.seed: int, self.world_size: int

Check it with `python -m exercises check sampler`.
"""

from collections.abc import Iterator

import torch


def __iter__(self) -> Iterator[int]:
    """Return an iterator over the indices of this rank's share, in this epoch's order.

    `self._total` is the length of all shares together. If it is less than `self.num_examples`, the
    last examples are left out; if it is more, the first ones are repeated, as often as necessary.
    """
    raise NotImplementedError("`DistributedSampler.__iter__` is not written yet.")
