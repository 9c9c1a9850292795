"""Launching complete buckets. Write `BucketDataParallel._on_gradient` of
data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
contains the solution.

You may use:

    bucket.move_in(parameter: nn.Parameter) -> None
        Make the gradient a view of this bucket; a gradient that this rank does not have is zero.
    self._guard.gradient_of(parameter: Tensor) -> Tensor | None
        Return the gradient that a backward has added up, or None where the backward has returned
        None.
    self._guard.is_synchronising
        False inside no_sync().
    self._launch(bucket: Bucket) -> None
        Start to average the bucket, and return while it travels: the backward goes on.
    bucket.missing, self._bucket_of, self._guard: Guard, self._to_launch

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
