"""The table of GPipe. Write `gpipe` of pipeline_parallel/schedules.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/schedules.py yet: it has the
solution.

You may use:

    _check(**numbers: int) -> None
        Raise ValueError for a number below 1, such as _check(stages=0).
    _Row()
        A row that grows action by action.
    row.add(kinds, stage)
        Add an action of each kind, such as "FB", for its next microbatch.
    row.actions: list[Action]

Check it with `python -m exercises check pipeline_gpipe`.
"""

from pipeline_parallel.actions import Table
from pipeline_parallel.schedules import _check, _Row


def gpipe(stages: int, microbatches: int) -> Table:
    """Return GPipe: all forwards, then all backwards, microbatches in the same order.

        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .

    Each rank is idle for (p-1)/(m+p-1) of the time, so more microbatches mean less idle time. But each rank
    holds the activations of all m microbatches. Huang et al., "GPipe", 2019, arXiv:1811.06965.
    """
    raise NotImplementedError("`gpipe` is not written yet.")
