"""Which gradients share a bucket. Write `fill` of data_parallel/flat.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/flat.py yet: it contains the
solution. All that you need is in this file, in the notebook and in the hints.

Check it with `python -m exercises check bucket_layout`.
"""

from torch import nn


def fill(parameters: list[nn.Parameter], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Divide parameters into buckets of neighbours of one dtype; return their positions, bucket by bucket.

    A bucket takes parameters until it has `bucket_bytes` (the first bucket: `first_bytes`). So its last
    parameter may make it larger than that.
    """
    raise NotImplementedError("Which gradients share a bucket is not written yet: `fill` has no body.")
