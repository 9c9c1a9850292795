"""Launching complete buckets. Write `BucketDataParallel._on_gradient` and
`BucketDataParallel.finish_gradient_sync` of data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
contains the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    bucket.flat
    bucket.missing: set[Tensor]
    bucket.move_in(parameter: Tensor) -> None
        Make the gradient a view of this bucket; if there is no gradient, fill its place with zeros.
    self._bucket_of
    self._drop_unfinished(parameter: Tensor) -> None
        Refuse a second backward, unless the gradients of the first, unfinished one were dropped.
    self._guard.has_gradient(parameter: Tensor) -> bool
        Return whether a hook's parameter has its complete gradient; refuse a sparse one.
    self._guard.is_synchronising
    self._guard.synchronised() -> None
        Note that all gradients are the mean over ranks.
    self._guard: ReplicaGuard
    self._launch(bucket: Bucket) -> None
        Start to reduce the bucket, and return while it travels: the backward goes on.
    self._make_buckets() -> None
        Divide the gradients among buckets, in the order in which the backward completes them.
    self._to_launch
    self._wait_for_all() -> None
        Wait for the handles of all buckets in flight, and prepare for the next backward.
    self.buckets
    self.group: Group
    self.order.adopt_observed(group: Group) -> bool
        After the first step, adopt the order that rank 0 observed.
    self.order.see(parameter: Tensor) -> None
        Note, in the first step, that the gradient of `parameter` is complete.
    self.order: BucketOrder
    self.sizes_on_wire
    self.trained
    self.wire_dtype
    size_on_wire(flat: Tensor, dtype: torch.dtype | None) -> tuple[int, int]
        Return how many numbers travel for `flat`, and the bytes of each; `dtype` None rounds nothing.
    used_on_any_rank(parameters: list[nn.Parameter], flags: Tensor) -> set[Tensor]
        Return the parameters that any rank used, from the reduced `flags`.

Check it with `python -m exercises check bucket_launch`.
"""

from torch import Tensor

from data_parallel.used_parameters import used_on_any_rank
from data_parallel.wire_format import size_on_wire


def _on_gradient(self, parameter: Tensor) -> None:
    """Run as a hook when a backward has added its gradient of this parameter.

    Return if `self._guard.has_gradient(parameter)` is False. `self._bucket_of` has the bucket of each
    parameter, and its `missing` the parameters whose gradients are not there. If this one is not
    missing, a second backward has begun: call `self._drop_unfinished(parameter)`. Move the gradient
    into the bucket. If `self._guard.is_synchronising`, tell `self.order.see(parameter)`, and launch
    what can be launched: `self._to_launch` is a deque of the buckets that are left, in order, and
    `self._launch(bucket)` starts the all-reduce of one.
    """
    raise NotImplementedError(
        "Launching complete buckets is not written yet: `BucketDataParallel._on_gradient` has no body."
    )


def finish_gradient_sync(self) -> None:
    """Launch the remaining buckets, with zeros for gradients that are missing; wait for all.

    A parameter that no rank used has no gradient afterwards: `used_on_any_rank(self.trained,
    self.buckets[-1].flags)` returns the parameters that were used. For each parameter that is
    still missing, its gradient becomes the view in its bucket, or None. `self._wait_for_all()`
    waits. Afterwards note `self.sizes_on_wire`, the list of size_on_wire(bucket.flat,
    self.wire_dtype); if `self.order.adopt_observed(self.group)`, call `self._make_buckets()`; and
    call `self._guard.synchronised()`.
    """
    raise NotImplementedError(
        "Launching complete buckets is not written yet: `BucketDataParallel.finish_gradient_sync` has no "
        "body."
    )
