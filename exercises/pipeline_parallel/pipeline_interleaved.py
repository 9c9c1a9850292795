"""The table of interleaved 1F1B. Write `interleaved_1f1b` of pipeline_parallel/schedules.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/schedules.py yet: it has the
solution.

You may use:

    _check(**numbers: int) -> None
        Raise ValueError for a number below 1, such as _check(stages=0).
    _rounds(ranks: int, microbatches: int) -> list[int]
        Return the size of each round: at least `ranks`, as even as possible, the larger rounds first.
    _Row()
        A row that grows action by action.
    row.add(kinds, stage)
        Add an action of each kind, such as "FB", for its next microbatch.
    row.actions: list[Action]

Check it with `python -m exercises check pipeline_interleaved`.
"""

from pipeline_parallel.actions import Table
from pipeline_parallel.schedules import _check, _rounds, _Row


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """Return interleaved 1F1B: each rank has `chunks` stages, and stage s is on rank s % p.

        rank 0   F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
        rank 1   .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .

    Microbatches go in rounds, whose sizes `_rounds` returns: the microbatches of a round go through
    all stages of a rank, and then those of the next round. Backwards take a round's stages in the
    opposite order. A rank begins with forwards: (chunks-1) times the size of the first round and 2
    (p-1-rank) more, or all there are. From then on a backward follows each forward.
    """
    raise NotImplementedError("`interleaved_1f1b` is not written yet.")
