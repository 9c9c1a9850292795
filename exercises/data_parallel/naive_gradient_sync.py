"""Averaging the gradients. Write `NaiveDataParallel.finish_gradient_sync` of data_parallel/train_naive.py.

Read notebooks/04_naive_data_parallel.ipynb first. Do not open data_parallel/train_naive.py yet: it has the
solution.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.

Check it with `python -m exercises check naive_gradient_sync`.
"""

import torch

from comm.collectives import all_reduce


def finish_gradient_sync(self) -> None:
    """Average the gradients, parameter by parameter, over the ranks of `self.group`.

    `self.module` is the model. Frozen parameters are left out. A rank has used a parameter if its
    `.grad` is not None; where it did not, it contributes zeros. The `op` of all_reduce may be "sum",
    "mean" or "max", and `pattern=self.pattern` chooses its algorithm.
    """
    raise NotImplementedError("`NaiveDataParallel.finish_gradient_sync` is not written yet.")
