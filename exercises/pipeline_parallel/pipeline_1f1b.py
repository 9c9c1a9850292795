"""The table of 1F1B. Write `one_f_one_b` of pipeline_parallel/schedules.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/schedules.py yet: it has the
solution.

You may use:

    _check(**numbers: int) -> None
        Raise ValueError for a number below 1, such as _check(stages=0).
    _Row()
        A row that grows action by action.

Check it with `python -m exercises check pipeline_1f1b`.
"""

from pipeline_parallel.actions import Table
from pipeline_parallel.schedules import _check, _Row


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """Return 1F1B: after some forwards, each rank does one forward and one backward in turn.

        rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

    The picture is one_f_one_b(3, 4). A backward such as B0--- takes twice as long as a forward. A
    point is idle time, which is not in the table. With p = `stages`, rank r has stage r.

    Rank r begins with a warmup of p-1-r forwards, one for each rank after it. If there are fewer
    microbatches than that, the warmup is all of them. The next forward already belongs to the steady
    state, in which a backward follows each forward. So p-r forwards stand before the first backward,
    and a rank holds at most p-r microbatches, however many there are. The backwards that are left are
    the cooldown. Rank 0 above has the warmup F0 F1, the steady state F2 B0 F3 B1 and the cooldown B2
    B3.

    A table is a list with one row for each rank. `row = _Row()` makes an empty row;
    `row.add("F", stage)` appends the next forward, and `row.add("FB", stage)` the next forward and
    the next backward; `row.actions` is the row for the table. First call `_check(stages=stages,
    microbatches=microbatches)`, which raises for a number below 1.
    """
    raise NotImplementedError("`one_f_one_b` is not written yet.")
