"""Which gradients share a bucket. Write `fill` of data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
has the solution.

Check it with `python -m exercises check bucket_layout`.
"""

from collections.abc import Iterable

from torch import nn

from lab.units import MIB


def fill(parameters: Iterable[nn.Parameter], first_mb: float, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of neighbours of one dtype.

    A bucket takes parameters until it has `bucket_mb` MiB (the first bucket: `first_mb`). So its last
    parameter may make it larger than that.
    """
    raise NotImplementedError("`fill` is not written yet.")
