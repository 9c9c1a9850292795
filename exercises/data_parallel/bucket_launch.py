"""Launching complete buckets. Write `BucketDataParallel._on_gradient` of
data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
has the solution.

You may use:

    bucket.move_in(parameter)
        Make the gradient a view of this bucket, zero if it is missing.

Check it with `python -m exercises check bucket_launch`.
"""

from torch import nn


def _on_gradient(self, parameter: nn.Parameter) -> None:
    """Run as a hook when a backward has added its gradient of this parameter.

    Return if `self._guard.gradient_of(parameter)` is None. `self._bucket_of` has the bucket of each
    parameter, and its set `missing` the parameters whose gradients are not there. Move the gradient
    into the bucket. If `self._guard.is_synchronising`, launch what can be launched: `self._to_launch`
    is a deque of the buckets that are left, in order, and `self._launch(bucket)` launches one.
    """
    raise NotImplementedError("`BucketDataParallel._on_gradient` is not written yet.")
