"""One order on all ranks. Write `OverlapDataParallel._on_gradient` of data_parallel/train_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_overlap.py yet: it has
the solution.

Check it with `python -m exercises check launch_order`.
"""

from torch import nn


def _on_gradient(self, parameter: nn.Parameter) -> None:
    """Run as a hook in the backward: the gradient of `parameter` holds the sum over microbatches.

    Ranks pair their all-reduces by the order of the calls, so all ranks must launch the parameters of
    `self._to_launch`, a deque, in its order, each once and as early as possible.
    `self._launch(parameter)` launches one, and the set `self._complete` is yours. Return at once if
    `self._guard.gradient_of(parameter)` is None, or if `self._guard.is_synchronising` is False: then
    this is not the last microbatch.
    """
    raise NotImplementedError("`OverlapDataParallel._on_gradient` is not written yet.")
