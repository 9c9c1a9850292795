"""The table of ZB-H1. Write `zb_h1` of pipeline_parallel/schedules.py.

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

Check it with `python -m exercises check pipeline_zb_h1`.
"""

from pipeline_parallel.actions import Table
from pipeline_parallel.schedules import _check, _Row


def zb_h1(stages: int, microbatches: int) -> Table:
    """Return ZB-H1: 1F1B with backwards in two halves. The stage before waits for I, and W fills idle time.

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r puts each W off by r backwards. So the last ranks, which would be idle at the end, have the most W
    left for that time. A rank is idle for (p-1)(f+i-w) if m >= p and w is the shortest of the three: a third
    of 1F1B's bubble if f = i = w. Every rank holds p microbatches, as rank 0 does in 1F1B. Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.
    """
    raise NotImplementedError("`zb_h1` is not written yet.")
