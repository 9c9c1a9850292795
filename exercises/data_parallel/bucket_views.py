"""Gradients that live in buckets. Write `Bucket.__init__` and `Bucket.move_in` of
data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
has the solution.

Check it with `python -m exercises check bucket_views`.
"""

import torch
from torch import nn


def __init__(self, parameters: list[nn.Parameter]) -> None:
    """Make a flat tensor of zeros, with a place for the gradient of each parameter.

    Set `self.flat`; `self.views`, a dict from each parameter to the view of its place, with the shape
    of the parameter and the strides that autograd gives to its gradient, which are those of
    torch.empty_like(parameter); and `self.missing`, a set of all parameters. All parameters have one
    dtype and device.
    """
    raise NotImplementedError("`Bucket.__init__` is not written yet.")


def move_in(self, parameter: nn.Parameter) -> None:
    """Make the parameter's gradient the view of its place in this bucket, with the gradient's
    values.

    Do not copy a gradient that is that view already. A gradient that this rank does not have is
    zero.
    """
    raise NotImplementedError("`Bucket.move_in` is not written yet.")
